"""What training waits for.

`diagnose` measures a loader with a step: `timing` has the clocks, `stages` times each stage of loading alone, `fixes`
tries what would help, and `resources` watches the memory. `watchdog` has `watch`, which looks on at a run and explains a
batch that does not come; `summary` says where its time went, and why; `stacks` looks into the worker that it waits for.
`simulator` needs no data at all.
"""
