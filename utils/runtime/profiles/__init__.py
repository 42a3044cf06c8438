"""Where the time of a step went: what the profilers of the devices recorded, by modules."""
