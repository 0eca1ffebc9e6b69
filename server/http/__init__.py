"""The HTTP side of the server: who asks, how large a request may be, the door for people, start and end."""
