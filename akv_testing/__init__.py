"""What tests of akv, and of servers that embed akv, are made of: virtual time, fakes of the ports, conformance suites."""
