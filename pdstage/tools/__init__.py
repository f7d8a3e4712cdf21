"""What operators run beside the library: demo, doctor, calibrate, watch (exporter and top), trace.

Nothing of the library imports it; it imports the library as a user's program does.
"""
