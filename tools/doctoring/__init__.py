"""What tools/doctor.py looks at, one room for each kind of thing."""
