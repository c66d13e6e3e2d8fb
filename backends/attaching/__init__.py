"""How a session hangs on the host's objects: one module for each type of socket."""
