//! Receives the guest's memory as file descriptors, over a separate connection (specs/extension.md §11).
//!
//! The main channel announces the memory ([`expect`]). By then the secret is known that authenticates the
//! connection ([`take`]). Pages cannot begin before the memory has arrived ([`check_that_it_came`]).

pub(super) mod handed;

use sterna_proto::MigrationId;
use sterna_ram::GuestRam;
use sterna_wire::extension::{HandedOver, MemoryAnswer, MemoryOffer, MigrationSecret};

use super::coming_memory::ComingMemory;
use super::greeting::Greeting;
use super::shared::Shared;
use crate::error::{BadMemory, MemoryDifference, MigrationError, Misbehaviour, Unproven};
use crate::same_host::check_peer;

/// Refuses memory from now on, because the migration has failed and its memory is about to be released. If an
/// offer is being taken, this waits for it, so that its memory is released as well.
pub(super) fn end(shared: &Shared) {
    *shared.memory.lock() = ComingMemory::Over;
}

/// The source has announced its memory.
pub(super) fn expect(shared: &Shared) -> Result<(), MigrationError> {
    let mut memory = shared.memory.lock();
    if shared.secret.lock().is_none() || *memory != ComingMemory::NotExpected || shared.ram_has_begun() {
        return Err(BadMemory::UntimelyAnnouncement.into());
    }
    *memory = ComingMemory::Expected;
    Ok(())
}

/// Checks, when RAM's blocks are due, that announced memory has arrived.
pub(super) fn check_that_it_came(shared: &Shared) -> Result<(), MigrationError> {
    shared.note_ram_has_begun();
    match *shared.memory.lock() {
        ComingMemory::Expected => Err(BadMemory::NotOffered.into()),
        ComingMemory::NotExpected if shared.target.guest().is_some_and(|ram| !has_memory(ram)) => {
            Err(MemoryDifference::ExpectedHere.into())
        }
        ComingMemory::NotExpected | ComingMemory::Taken | ComingMemory::Over => Ok(()),
    }
}

fn has_memory(ram: &GuestRam) -> bool {
    ram.blocks().iter().all(|block| !block.is_gone())
}

/// Takes the memory that a connection offers, and sends the result on it. An error refuses the connection and
/// leaves the migration unchanged: the source decides whether to continue without it.
pub(super) fn take(shared: &Shared, greeting: &Greeting<'_>) -> Result<(), MigrationError> {
    let (offer, secret) = read_offer(shared, greeting)?;
    let taken = read_memory(shared, greeting, &offer, &secret);
    let answer = match &taken {
        Ok(()) => MemoryAnswer::Taken,
        Err(error) => MemoryAnswer::Refused(error.to_string()),
    };
    let mut bytes = Vec::new();
    answer.encode(&mut bytes);
    greeting.limit()?;
    greeting.channel.write_all(&bytes)?;
    taken
}

/// Reads the offer. A connection that does not name this migration receives no data.
fn read_offer(
    shared: &Shared,
    greeting: &Greeting<'_>,
) -> Result<(MemoryOffer, MigrationSecret), MigrationError> {
    check_peer(greeting.channel, &shared.params)?;
    let mut bytes = [0; MemoryOffer::BYTES];
    greeting.read_exact(&mut bytes)?;
    let decoded = MemoryOffer::decode(&bytes).map_err(MigrationError::wire("memory connection"))?;
    let Some((offer, _)) = decoded else {
        return Err(MigrationError::Internal("an offer of full length is incomplete".to_owned()));
    };
    let id = MigrationId(offer.migration_id);
    let known =
        shared.secret.lock().as_ref().filter(|(known, _)| *known == id).map(|(_, secret)| secret.clone());
    let secret = known.ok_or_else(|| refused(greeting, Unproven::UnknownMigration))?;
    Ok((offer, secret))
}

fn refused(greeting: &Greeting<'_>, why: Unproven) -> MigrationError {
    Misbehaviour::Offer { peer: greeting.channel.peer().to_owned(), why }.into()
}

fn read_memory(
    shared: &Shared,
    greeting: &Greeting<'_>,
    offer: &MemoryOffer,
    secret: &MigrationSecret,
) -> Result<(), MigrationError> {
    greeting.limit()?;
    let descriptors = greeting.channel.receive_descriptors()?;
    let mut table = vec![0; offer.table_bytes as usize];
    greeting.read_exact(&mut table)?;
    if !offer.is_authentic(secret, &table) {
        return Err(refused(greeting, Unproven::NoProof));
    }
    let table = HandedOver::decode_table(&table).map_err(MigrationError::wire("memory connection"))?;
    let mut memory = shared.memory.lock();
    if *memory != ComingMemory::Expected || shared.is_stopping() {
        return Err(BadMemory::NotAnnounced.into());
    }
    shared.target.take_memory(&table, descriptors)?;
    *memory = ComingMemory::Taken;
    Ok(())
}
