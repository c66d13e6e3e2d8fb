"""How a session is attached to the host's objects: one module for each type of socket."""
