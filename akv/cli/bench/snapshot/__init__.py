"""`akv bench snapshot`: how long window pages hold the execution stream while they are copied, beside plain ways to do it."""
