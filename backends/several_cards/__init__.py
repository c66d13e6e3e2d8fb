"""What only a host with more than one card needs. It knows none of the rooms that it serves."""
