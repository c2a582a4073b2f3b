"""`akv config`: settings checked, explained and described before a server starts with them."""
