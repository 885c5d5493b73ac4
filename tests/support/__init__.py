"""What the tests share: real servers, real processes and waiting with a limit."""
