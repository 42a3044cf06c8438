"""Programs that trace or compile in a process of their own."""
