"""What must survive a restart: saved atomically (`store`), beside training (`writer`), in any layout (`layout`)."""
