"""What training waits for.

`diagnose` measures a loader with a step, and tries what would help: `timing` has the clocks,
`stages` times each stage of loading alone, and `fixes` tries each cure. `watch` looks on at a run,
and explains a batch that does not come; `summary` says where the time went, and `causes` why;
`processes` looks into the workers, and `memory_growth` at the memory. `simulator` needs no data at
all.
"""
