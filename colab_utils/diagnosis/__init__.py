"""What training waits for.

`diagnose` measures a loader with a step, and says what would help. `timing` times batches and the
cores, and says which difference of two rates counts. `stages` times each stage of loading alone.
`fixes` forecasts every fix, and tries the best one; others where the trial does not confirm it.

`watch` observes a run. `passes` follows its batches, and describes a batch that does not come in
the words of `cures`. `summary` says where the time went. `causes` says why: `waits` explains why
batches come late, `looks` has the evidence, and `cures` says what to do. `processes` looks into the
workers, `system_calls` reads what Linux says of them, and `memory_growth` finds growing memory.

`simulator` shows how loading and steps overlap. It needs no data.
"""
