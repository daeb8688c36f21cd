"""The command `kvbench replay`: does tiering help end to end, honestly measured?"""
