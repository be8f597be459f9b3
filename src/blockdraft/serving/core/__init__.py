"""What the routes of all APIs stand on: jobs in, events out."""
