"""The service under the routes of all APIs: it takes jobs and gives events."""
