"""`akv bench`: measurements that a reader can repeat."""
