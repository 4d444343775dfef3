//! Cloud Hypervisor's machines in images.

use std::sync::Arc;

use sterna_store::StoredImage;

use super::error::SessionError;
use super::layout::MemoryLayout;
use super::machine::migration_config;
use super::machine_error::MachineError;
use super::rules::{CONFIG_MOST, STATE_MOST};
use crate::content::Content;
use crate::options::PagerOptions;
use crate::sources::StoredMemory;

/// The kind of such images, and of what conversions of snapshot directories give.
pub(super) const KIND: &str = "cloud-hypervisor";
/// The memory, one range after the other.
pub(super) const MEMORY: &str = "memory-ranges";
/// The machine's configuration, as the VMM's own snapshots have it.
pub(super) const CONFIG: &str = "config.json";
/// The state of processors and devices.
pub(super) const STATE: &str = "state.json";
/// The `Config` of a migration, byte for byte. Snapshots that the VMM wrote itself lack it.
pub(super) const MIGRATION_CONFIG: &str = "migration-config.json";

/// A machine of Cloud Hypervisor in an image. Several guests may be restored from it at once.
pub struct SavedMachine {
    name: String,
    pub(super) layout: MemoryLayout,
    pub(super) config: Vec<u8>,
    pub(super) state: Vec<u8>,
    pub(super) content: Content,
}

impl SavedMachine {
    /// Reads everything except the memory. `cache_limit_bytes`: most memory for frames, for all guests together, at least
    /// [`PagerOptions::LEAST_CACHE_BYTES`].
    ///
    /// # Errors
    /// [`SessionError::OtherKind`], [`SessionError::LacksFile`], [`SessionError::Machine`]; the errors of reads.
    pub fn new(image: &Arc<StoredImage>, cache_limit_bytes: u64) -> Result<Self, SessionError> {
        let name = image.name().to_owned();
        if image.kind() != KIND {
            return Err(SessionError::OtherKind { name, kind: image.kind().to_owned() });
        }
        let state = read(image, STATE, STATE_MOST)?.ok_or_else(|| lacks(image, STATE))?;
        let config = match read(image, MIGRATION_CONFIG, CONFIG_MOST)? {
            Some(config) => config,
            None => {
                let config = read(image, CONFIG, CONFIG_MOST)?.ok_or_else(|| lacks(image, CONFIG))?;
                migration_config(&config, &state)?
            }
        };
        let layout = MemoryLayout::new(&config, &state)?;
        let memory = StoredMemory::new(Arc::clone(image))?;
        let content = Content::new(Arc::new(memory), cache_limit_bytes.max(PagerOptions::LEAST_CACHE_BYTES));
        let (image, machine) = (content.source.len_bytes(), layout.len_bytes());
        if image != machine {
            return Err(MachineError::OtherLength { image, machine }.into());
        }
        Ok(Self { name, layout, config, state, content })
    }

    /// The image's path or address.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of the guest's memory.
    pub fn memory_bytes(&self) -> u64 {
        self.layout.len_bytes()
    }
}

fn lacks(image: &StoredImage, file: &'static str) -> SessionError {
    SessionError::LacksFile { name: image.name().to_owned(), file }
}

fn read(image: &Arc<StoredImage>, file: &'static str, most: u64) -> Result<Option<Vec<u8>>, SessionError> {
    let Some(reader) = image.file(file)? else { return Ok(None) };
    let bytes = reader.len_bytes();
    if bytes > most {
        return Err(SessionError::LongFile { name: image.name().to_owned(), file, bytes, most });
    }
    let mut content = vec![0; bytes as usize];
    reader.read_at(0, &mut content)?;
    Ok(Some(content))
}
