"""What can be run on a GPU *or* traced without one, written once."""
