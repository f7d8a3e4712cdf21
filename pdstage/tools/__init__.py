"""Commands beside the library: demo, doctor, calibrate, trace.

The library does not import it; it imports the library as a user's program does.
"""
