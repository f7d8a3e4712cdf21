"""Makes a sysfs tree of RDMA devices, as the kernel lays it out, with the files of /dev/infiniband beside it."""

from __future__ import annotations

_STATES = {"DOWN": 1, "ACTIVE": 4}


def written(root, files: dict[str, str]):
    """Files of these lines, and the folders that they lie in."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")


def nic(root, name, *states, link="InfiniBand"):
    """An RDMA device with a port for each state, in `root/sys` and `root/dev`."""
    verbs = f"uverbs{len(list(root.glob('dev/infiniband/*')))}"
    files = {f"sys/class/infiniband_verbs/{verbs}/ibdev": name, f"dev/infiniband/{verbs}": ""}
    for number, state in enumerate(states, 1):
        port = f"sys/class/infiniband/{name}/ports/{number}"
        files |= {f"{port}/link_layer": link, f"{port}/rate": "400 Gb/sec (4X NDR)"}
        files[f"{port}/state"] = f"{_STATES[state]}: {state}"
    written(root, files)
