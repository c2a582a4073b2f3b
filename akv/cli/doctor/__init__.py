"""`akv doctor`: what is wrong on this machine, and what of it can be put right."""
