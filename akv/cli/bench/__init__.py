"""`akv bench`: measurements that a reader can repeat. They report; nothing is gated by them."""
