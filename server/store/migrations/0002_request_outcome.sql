-- What came of a request whose effect lies outside the records (a signal). NULL: nothing that the object would not tell.
ALTER TABLE request ADD COLUMN outcome TEXT CHECK (outcome IN ('sent', 'delivered', 'unknown'));
