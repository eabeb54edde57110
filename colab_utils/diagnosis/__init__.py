"""What training waits for.

`diagnose` measures a loader with a step: `timing` has the clocks, `stages` times each stage of loading alone, `fixes`
tries what would help, and `resources` watches the memory. `watchdog` looks on at a run (`watch`) and explains a batch
that does not come; `summary` says where the time went, and why; `stacks` looks into the worker that is waited for.
`simulator` needs no data at all.
"""
