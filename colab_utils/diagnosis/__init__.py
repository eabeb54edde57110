"""What training waits for.

`diagnose` measures a loader with a step: `timing` has the clocks, `stages` times each stage of loading alone, `fixes`
tries what would help, and `resources` watches the memory. `watchdog` explains a batch that does not come; `stacks`
looks into the worker that it waits for. `simulator` needs no data at all.
"""
