"""The queue of one machine: a directory for each job, and one dispatcher that starts them.

`files` reads and writes a job's directory, `rules` decides what follows a program's end, `child`
holds a job's lock during an attempt, `slots` are the devices, `dispatcher` starts, adopts and stops
jobs; `starters` starts an attempt as a new program or as a fork of `warm_child`.
"""
