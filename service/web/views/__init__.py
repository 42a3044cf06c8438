"""What pages show, as plain values: each view is made of records, and a template only lays it out.

`frame` is around all pages, `jinja` has the filters of templates, `figures` draws curves without
script, the others are named after their pages.
"""
