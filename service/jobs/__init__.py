"""The queue of one machine: a directory for each job, and one dispatcher that starts them.

`files` holds what is written, `rules` decides what comes after a program's end, `child` is the
program that holds a job's lock, `slots` are the devices, `dispatcher` starts, adopts and stops;
`starters` has it start each attempt as a new program or as a fork of `warm_child`.
"""
