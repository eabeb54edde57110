"""What training waits for.

`diagnose` measures a loader with a step, and tries what would help: `timing` has the clocks,
`stages` times each stage of loading alone, and `fixes` tries each cure. `changes` compares it with
an earlier run. `watch` looks on at a run: `passes` follows the batches, and a batch that does not
come becomes one of the `stalls`. `summary` says where the time went, and `causes` why: by `waits`
for batches, what was seen in `looks`, and the table of `cures`. `processes` looks into the workers,
by what `system_calls` reads of Linux, and `memory_growth` at the memory.
`ranks` names the process that the others wait for. `simulator` needs no data at all.
"""
