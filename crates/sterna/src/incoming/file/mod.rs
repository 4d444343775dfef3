//! A guest comes out of a file instead of from a peer (specs/mapped-ram.md §6).
//!
//! A stream in a file is read front to back like a channel. A mapped-ram file is read in three steps:
//!
//! 1. its **structure**: everything but pages, to its end, held against the rules of the format and against this
//!    machine, before a byte of RAM is written or a device is given a byte (those with a stream have been told by then
//!    that one will come). A file that was cut, that is another machine's, whose offsets point astray, stops here
//!    ([`structure`]);
//! 2. its **pages**, by several threads, straight into guest RAM ([`pages`]). A page whose bit is clear is zero,
//!    whatever the file holds there;
//! 3. the elements of the stream in their order, so the devices: read a second time, so that a device's state is
//!    never held whole.
//!
//! The file must not change meanwhile, and if it did the guest does not start: its times tell, and blocks must be met
//! again in step 3 where their pages were in step 2. A file does not answer and is not a peer: this side takes the guest over when all is loaded, and the file stays as it is.

mod pages;
mod structure;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_proto::destination::Event as Fed;
use sterna_transport::Direct;
use sterna_wire::main::MainItem;

use super::load_file::LoadFile;
use super::loader::{Loader, Read};
use super::shared::Shared;
use crate::error::MigrationError;
use crate::events::Event;

/// Begins: there is nobody to wait for.
pub(super) fn begin(shared: &Shared) {
    if shared.begin().is_none() {
        return;
    }
    if let Some(load) = shared.file.as_ref()
        && shared.params.direct_io != Direct::Off
        && !load.file.is_direct()
    {
        let text = format!("{}: no direct I/O here, so this goes through the page cache", shared.address);
        shared.tell(&Event::Warning(text));
    }
    shared.report(Fed::ChannelsReady);
}

/// Loads all of it, or until told to stop.
pub(super) fn load(shared: &Arc<Shared>) {
    if let Err(error) = run(shared) {
        shared.fail(error);
    }
}

fn run(shared: &Arc<Shared>) -> Result<(), MigrationError> {
    let Some(LoadFile { file, offset }) = &shared.file else {
        return Err(MigrationError::Internal("there is no file".to_owned()));
    };
    let before = file.version().map_err(MigrationError::storage)?;
    let mut loader = Loader::of_file(shared, file, *offset);
    let is_unchanged = || Ok::<_, MigrationError>(file.version().map_err(MigrationError::storage)? == before);
    let mut blocks = Vec::new();
    if shared.capabilities.mapped_ram {
        blocks = structure::read(&mut loader, file)?;
        // It is read once more, and counts then.
        shared.received_bytes.store(0, Ordering::Relaxed);
        pages::load(shared, file, &blocks)?;
        if shared.stopping.load(Ordering::Acquire) {
            return Ok(());
        }
        if !is_unchanged()? {
            return Err(changed(shared));
        }
        loader = Loader::of_file(shared, file, *offset);
    }
    let mut again = blocks.iter();
    loop {
        let item = match loader.read()? {
            Read::Item(item) => item,
            Read::End | Read::Stopped => return Ok(()),
        };
        let is_same = match &item {
            MainItem::MappedBlock { name, length_bytes, header, .. } => {
                again.next().is_some_and(|block| block.is(name, *length_bytes, header))
            }
            // Before the end is told, so before the guest can start.
            MainItem::Eof => again.len() == 0 && is_unchanged()?,
            _ => true,
        };
        if !is_same {
            return Err(changed(shared));
        }
        loader.take(item)?;
    }
}

fn changed(shared: &Shared) -> MigrationError {
    let what =
        format!("{} was changed while it was loaded; load it again when nobody writes it", shared.address);
    MigrationError::PeerMisbehaved { what }
}
