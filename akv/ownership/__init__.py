"""Everything that is owned while work is in flight, in one synchronous place.

Each class here has one owner, changes state, returns what is to be done next (effects or results), and never waits. Nothing
here knows a loop, a thread, a clock, a store or a device, so every race is a sequence of calls that a test can write down.
"""
