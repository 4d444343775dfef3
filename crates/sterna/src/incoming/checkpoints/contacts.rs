//! Connections of a primary that bring no guest: the contact, and the writes to disks (specs/replica.md).

use sterna_wire::nbd::DiskHello;
use sterna_wire::replica::Hello;

use crate::error::MigrationError;
use crate::incoming::greeting::Greeting;
use crate::incoming::shared::Shared;
use crate::interruption::Break;

/// Takes a connection whose first bytes are still unread.
type Take = fn(&Shared, &Greeting<'_>) -> Result<(), Break>;

/// What takes a connection with these first four bytes; `None` if it is no primary's.
pub(in crate::incoming) fn contact_of(magic: &[u8]) -> Option<Take> {
    match magic {
        magic if magic == Hello::MAGIC => Some(contact),
        magic if magic == DiskHello::MAGIC => Some(disk),
        _ => None,
    }
}

/// Gives the connection to the contact between primary and standby of a protected guest (specs/replica.md).
fn contact(shared: &Shared, greeting: &Greeting<'_>) -> Result<(), Break> {
    // The whole hello must arrive within the greeting's limit. Afterwards the contact uses its own limits.
    greeting.peek(4, Hello::BYTES)?;
    greeting.channel.set_stall_limit(None);
    Ok(shared.target.contact(greeting.channel)?)
}

/// Gives the connection to the writes to a protected guest's disk (specs/replica.md §6).
fn disk(shared: &Shared, greeting: &Greeting<'_>) -> Result<(), Break> {
    let mut hello = DiskHello::BYTES;
    greeting.read_exact(&mut hello)?;
    DiskHello::decode(&hello).map_err(MigrationError::wire("disk"))?;
    greeting.channel.set_stall_limit(None);
    Ok(shared.target.disk(greeting.channel)?)
}
