"""What follows from a workload A and a strategy C: sensitivity, errors, how good any strategy can be, what is best."""
