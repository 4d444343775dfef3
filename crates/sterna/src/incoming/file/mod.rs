//! Loads a guest from a file instead of from a peer (specs/mapped-ram.md §6).
//!
//! A legacy stream in a file is read front to back, as a channel is. A mapped-ram file is read in three steps:
//!
//! 1. [`structure`] reads everything except pages to the end of the file. It checks the format's rules and this
//!    machine before RAM is written or a device gets a byte. A device with a stream has been told by then that
//!    the stream follows. A truncated file, a file of another machine, or a file with wrong offsets is refused
//!    here.
//! 2. [`pages`] reads pages by several threads directly into guest RAM. A page whose bit is clear is zero,
//!    whatever the file contains at its place.
//! 3. The stream's elements, and therefore the devices, are loaded in order. The file is read a second time, so
//!    that a device's state is never kept in memory as a whole.
//!
//! The file must not change meanwhile. A change is detected by the file's times, and because step 3 must find
//! the same blocks as step 2. The guest then does not start.
//!
//! A file is not a peer and sends no answers. This side takes the guest over when everything is loaded, and
//! leaves the file unchanged.

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
use super::transport::interface::{Beginning, Waiting};
use crate::error::{MigrationError, Misbehaviour};
use crate::events::Event;
use crate::start_error::StartError;

/// Loads a guest from a file as soon as the migration begins. Without [`Capabilities::unmanaged`](crate::Capabilities::unmanaged)
/// the guest arrives paused, because no source exists whose end could be awaited.
pub(super) fn wait(beginning: Beginning<'_>) -> Result<Waiting, StartError> {
    let file = LoadFile::open(beginning.at, &beginning.params)?;
    let custody = beginning.claim()?;
    let (address, unmanaged) = (beginning.at.clone(), beginning.capabilities.unmanaged);
    let mut shared = beginning.shared(custody, address)?;
    shared.file = file;
    if !unmanaged {
        let _ = shared.autostart.set(false);
    }
    let listen = |shared: &Arc<Shared>| {
        start(shared);
        Ok(None)
    };
    Ok(Waiting { shared, listen: Box::new(listen) })
}

/// Begins to load immediately, because there is no source to wait for.
fn start(shared: &Shared) {
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

/// Loads the whole file, or until the migration stops.
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
        // The second reading counts the bytes, so the first is not counted.
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
            // Checked before EOF is reported, and therefore before the guest can start.
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
    Misbehaviour::FileChanged { file: shared.address.to_string() }.into()
}
