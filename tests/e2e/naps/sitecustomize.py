"""vLLM's processes yield in a loop while they wait for one another. Linux 6.18 then leaves all else that waits on those
processors waiting, for up to 40 s on two. Here they nap instead. Python imports this where it is on PYTHONPATH.
"""

import os
import time

os.sched_yield = lambda: time.sleep(5e-5)
