"""The HTTP front: takes requests, puts them on the queue, answers with the replies."""
