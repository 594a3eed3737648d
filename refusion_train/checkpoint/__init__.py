"""What must survive a restart: saved atomically (`store`), independent of the layout of ranks (`layout`)."""
