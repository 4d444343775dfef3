//! Packs: where the frames of a store's images are.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::image_store::ImageStore;
use super::keys::{IMAGES, pack_key};
use super::lease::Lease;
use crate::blob::Blob;
use crate::error::StoreError;
use crate::layout::{FOOTER_BYTES, Footer, FrameEntry};
use crate::objects::Condition;
use crate::read::FrameSource;
use crate::write::FrameSink;

/// Bytes after which a pack is written. It is in memory until it is stored.
const PACK_BYTES: usize = 32 << 20;
/// Packs that are being written while the next one is filled.
const SENDING: usize = 2;

/// Reads frames of a store's image.
pub(super) struct PackSource {
    store: ImageStore,
    name: String,
    index_bytes: u64,
    packs: Vec<[u8; 16]>,
    open: Mutex<HashMap<u32, Arc<dyn Blob>>>,
}

impl PackSource {
    pub(super) fn new(store: ImageStore, name: String, index_bytes: u64, packs: Vec<[u8; 16]>) -> Self {
        Self { store, name, index_bytes, packs, open: Mutex::new(HashMap::new()) }
    }

    fn pack(&self, number: u32) -> Result<Arc<dyn Blob>, StoreError> {
        if let Some(blob) = self.open.lock().get(&number) {
            return Ok(Arc::clone(blob));
        }
        let blob = self.store.objects.open(&pack_key(&self.packs[number as usize]))?;
        self.open.lock().insert(number, Arc::clone(&blob));
        Ok(blob)
    }
}

impl FrameSource for PackSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn read(&self, entry: &FrameEntry, to: &mut [u8]) -> Result<(), StoreError> {
        self.pack(entry.pack)?.read_exact_at(entry.offset, to)
    }

    fn len_bytes(&self) -> u64 {
        self.index_bytes
    }
}

/// Writes the frames of a new image into packs.
pub(super) struct PackSink {
    store: ImageStore,
    name: String,
    name_key: String,
    lease: Lease,
    replace: bool,
    state: Mutex<Packs>,
}

struct Packs {
    /// All packs: those of other images first, then those of this image.
    ids: Vec<[u8; 16]>,
    /// The pack that is being filled, and its number.
    filling: Option<(u32, Vec<u8>)>,
    /// The packs that are being written, the oldest first.
    sending: VecDeque<Sending>,
    /// Bytes of all frames that were new.
    bytes: u64,
}

/// A pack that a thread writes.
struct Sending {
    number: u32,
    bytes: Arc<Vec<u8>>,
    thread: JoinHandle<Result<(), StoreError>>,
}

impl Packs {
    /// Waits for the oldest pack that is being written.
    fn finish_one(&mut self) -> Result<(), StoreError> {
        let Some(sending) = self.sending.pop_front() else { return Ok(()) };
        sending.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// The bytes of a pack that is in memory.
    fn in_memory(&self, pack: u32) -> Option<&[u8]> {
        let filling =
            self.filling.as_ref().filter(|(number, _)| *number == pack).map(|(_, bytes)| &bytes[..]);
        filling.or_else(|| {
            self.sending.iter().find(|sending| sending.number == pack).map(|sending| &sending.bytes[..])
        })
    }
}

impl PackSink {
    pub(super) fn new(
        store: &ImageStore,
        name: &str,
        lease: Lease,
        known: Vec<[u8; 16]>,
        replace: bool,
    ) -> Self {
        let state = Mutex::new(Packs { ids: known, filling: None, sending: VecDeque::new(), bytes: 0 });
        let name_key = store.name_key(name);
        Self { store: store.clone(), name: store.shown(name), name_key, lease, replace, state }
    }

    /// Begins to write the pack that is being filled.
    fn write(&self, packs: &mut Packs) -> Result<(), StoreError> {
        let Some((number, bytes)) = packs.filling.take() else { return Ok(()) };
        self.lease.renew()?;
        while packs.sending.len() >= SENDING {
            packs.finish_one()?;
        }
        let key = pack_key(&packs.ids[number as usize]);
        let (objects, bytes) = (Arc::clone(&self.store.objects), Arc::new(bytes));
        let sent = Arc::clone(&bytes);
        let put = move || objects.put(&key, &sent, Condition::IfAbsent).map(|_| ());
        let thread = std::thread::Builder::new().name("pack".into()).spawn(put);
        let thread = thread.map_err(|error| StoreError::io(&self.name, "starting a thread", error))?;
        packs.sending.push_back(Sending { number, bytes, thread });
        Ok(())
    }

    /// Gives the image its name.
    fn give_name(&self, digest: &str) -> Result<(), StoreError> {
        let line = format!("{digest}\n");
        let objects = &self.store.objects;
        if !self.replace {
            return objects.put(&self.name_key, line.as_bytes(), Condition::IfAbsent).map(|_| ());
        }
        objects.put(&self.name_key, line.as_bytes(), Condition::Always).map(|_| ())
    }
}

impl Drop for PackSink {
    fn drop(&mut self) {
        // The lease is removed after this. A pack that arrived later could be taken for garbage of no save.
        for sending in self.state.get_mut().sending.drain(..) {
            // The save has failed already.
            let _ = sending.thread.join();
        }
    }
}

impl FrameSink for PackSink {
    fn name(&self) -> &str {
        &self.name
    }

    fn append(&self, stored: &[u8]) -> Result<(u32, u64), StoreError> {
        let mut packs = self.state.lock();
        let is_full =
            packs.filling.as_ref().is_some_and(|(_, bytes)| bytes.len() + stored.len() > PACK_BYTES);
        if is_full {
            self.write(&mut packs)?;
        }
        if packs.filling.is_none() {
            let mut id = [0; 16];
            crate::write::random(&mut id, &self.name)?;
            let number = packs.ids.len() as u32;
            packs.ids.push(id);
            packs.filling = Some((number, Vec::with_capacity(PACK_BYTES)));
        }
        packs.bytes += stored.len() as u64;
        let Some((number, bytes)) = &mut packs.filling else {
            return Err(StoreError::Request(format!("{}: no pack is open", self.name)));
        };
        let place = (*number, bytes.len() as u64);
        bytes.extend_from_slice(stored);
        Ok(place)
    }

    fn read_back(&self, pack: u32, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        let id = {
            let packs = self.state.lock();
            if let Some(bytes) = packs.in_memory(pack) {
                let found = bytes.get(offset as usize..).and_then(|rest| rest.get(..to.len()));
                let missing = || StoreError::Request(format!("pack {pack} of {} ends early", self.name));
                to.copy_from_slice(found.ok_or_else(missing)?);
                return Ok(());
            }
            packs.ids[pack as usize]
        };
        self.store.objects.open(&pack_key(&id))?.read_exact_at(offset, to)
    }

    fn flush(&self) -> Result<Vec<[u8; 16]>, StoreError> {
        let mut packs = self.state.lock();
        self.write(&mut packs)?;
        while !packs.sending.is_empty() {
            packs.finish_one()?;
        }
        Ok(packs.ids.clone())
    }

    fn end(&self) -> u64 {
        // The object of the image has no frames: the index follows the header.
        crate::layout::HEADER_BYTES as u64
    }

    fn complete(&mut self, header: &[u8], tail: &[u8]) -> Result<u64, StoreError> {
        let mut footer = [0; FOOTER_BYTES];
        footer.copy_from_slice(&tail[tail.len() - FOOTER_BYTES..]);
        let digest = Footer::decode(&footer).map(|footer| footer.digest.to_string()).unwrap_or_default();
        let (key, object) = (format!("{IMAGES}{digest}"), [header, tail].concat());
        match self.store.objects.put(&key, &object, Condition::IfAbsent) {
            // The same image is there already, and stays if no collection is about to remove it.
            Err(StoreError::Conflict { .. }) if !self.lease.condemned.contains(&key) => {}
            done => drop(done?),
        }
        self.lease.check()?;
        self.give_name(&digest)?;
        // A collection that found the lease too old may have removed packs between the check and the name.
        if let Err(error) = self.lease.check() {
            self.store.objects.delete(&self.name_key)?;
            return Err(error);
        }
        Ok(self.state.lock().bytes + object.len() as u64)
    }
}
