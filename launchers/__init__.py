"""Starting training processes: on this host (local) and, later, on clusters."""
