//! Saves into a file that the VM writes itself.
//!
//! QEMU gets two write-only descriptors instead of a name (`file:/dev/fdset/N`, specs/mapped-ram.md §4.11). One uses
//! the page cache and is for everything, the other bypasses it and is for the pages. A QEMU without mapped-ram may
//! not know `file:`, which was added in 8.2. It gets the descriptor itself (`fd:NAME`), positioned at the start of
//! the stream. Sterna's own VMM gets a name next to the image's path. It creates a complete file there, or none.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::OFlags;
use serde_json::json;
use sterna_image::Form;
use sterna_transport::{CreateOptions, Direct, Flusher, IoPart, PageFile};

use super::head::Head;
use super::{NAME, RUNNING, SaveRequest, Settled, check, run_state};
use crate::{DriveError, Settings, Vm};

/// A staging file, and its address for the VM.
pub(super) struct Written {
    file: Arc<PageFile>,
    /// The thread that flushes the page cache, if pages are written through it.
    flusher: Option<Flusher>,
    set: Option<u64>,
    /// The VM got a descriptor under [`NAME`].
    is_named: bool,
    /// The path at which Sterna's own VMM writes.
    beside: Option<PathBuf>,
    head: Option<Head>,
    uri: String,
}

impl Written {
    /// Creates the file and passes it to the VM.
    pub(super) fn begin(
        vm: &mut Vm,
        settings: &Settings,
        request: &SaveRequest,
        was_running: bool,
    ) -> Result<Self, DriveError> {
        if vm.is_sterna() && request.domain.is_some() {
            return Err(DriveError::Unfit(
                "libvirt cannot run Sterna's own VMM: save as mapped-ram or legacy".into(),
            ));
        }
        let head = match &request.domain {
            None => None,
            Some(domain) => Some(Head::new(request.format, domain, was_running)?),
        };
        // Parts of a legacy stream are unaligned, so QEMU writes it through the page cache.
        let direct = match (request.format.form(), request.direct) {
            (Form::Legacy, Direct::Required) => {
                return Err(DriveError::Request(format!(
                    "{} is a stream, which goes through the page cache: leave --direct-io out, or save as mapped-ram or \
                     libvirt-sparse",
                    request.format
                )));
            }
            (Form::Legacy, _) => Direct::Off,
            // Sterna's own VMM has enough writes under way to use the disk fully.
            (Form::Mapped, Direct::Wanted) if !vm.is_sterna() && fits_page_cache(vm)? => Direct::Off,
            (Form::Mapped, direct) => direct,
        };
        let options = CreateOptions { direct, replace: request.replace, ..CreateOptions::default() };
        let file = Arc::new(PageFile::create(&request.path, options)?);
        if let Some(head) = &head {
            file.write_at(0, &[IoPart::Bytes(&head.bytes(false))])?;
        }
        let flusher = (!file.is_direct()).then(|| Flusher::start(&file));
        let (set, is_named, beside) = (None, false, None);
        let mut written = Self { file, flusher, set, is_named, beside, head, uri: String::new() };
        written.pass(vm, settings)?;
        Ok(written)
    }

    /// Whether the VM writes pages past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.file.is_direct()
    }

    /// The address for `migrate`.
    pub(super) fn uri(&self) -> String {
        self.uri.clone()
    }

    /// An explanation for the error of a full disk, for which QEMU only reports *Input/output error*.
    pub(super) fn explain(&self) -> Option<String> {
        let path = self.file.staging_path()?;
        let room = rustix::fs::statvfs(&path).ok()?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        (free < 1 << 20).then(|| format!("there is no space left for {}", self.file.path().display()))
    }

    /// Checks the file, flushes it to the disk and renames it. `state`: the guest's run state before it was stopped.
    pub(super) fn settle(
        &mut self,
        vm: &mut Vm,
        request: &SaveRequest,
        state: &str,
    ) -> Result<Settled, DriveError> {
        let path = self.file.staging_path().ok_or_else(|| {
            DriveError::Failed(format!("{} was renamed before it was checked", request.path.display()))
        })?;
        if let Some(flusher) = &mut self.flusher {
            flusher.end()?;
        }
        if let Some(beside) = self.beside.take() {
            std::fs::rename(&beside, &path).map_err(|error| DriveError::file("rename", beside, error))?;
        }
        if let Some(head) = &self.head {
            // The head is marked as complete only after the stream is on the disk.
            self.file.sync()?;
            self.file.write_at(0, &[IoPart::Bytes(&head.bytes(true))])?;
        }
        let offset = self.head.as_ref().map_or(0, Head::stream_offset);
        let blocks = vm.blocks()?;
        let place = check::written(&path, request.format.form(), offset, blocks.as_deref())?;
        if let Some(place) = place.filter(|_| self.head.is_none() && state == RUNNING && !vm.is_sterna()) {
            self.file.write_at(place, &[IoPart::Bytes(&run_state::encode(state))])?;
        }
        self.file.sync()?;
        let there = std::fs::metadata(&path).map_err(|error| DriveError::file("look at", &path, error))?;
        let settled = Settled {
            file_bytes: there.len(),
            allocated_bytes: there.blocks() * 512,
            is_direct: self.file.is_direct(),
        };
        self.file.publish()?;
        Ok(settled)
    }

    /// Removes the descriptors from the VM.
    pub(super) fn clean(&mut self, vm: &mut Vm) {
        if let Some(set) = self.set.take() {
            // If the VM has ended, it has no descriptors to remove.
            let _ = vm.try_execute("remove-fd", json!({ "fdset-id": set }));
        }
        if std::mem::take(&mut self.is_named) {
            // A migration removes the descriptor from the VM's list. Then the refusal is no error.
            let _ = vm.try_execute("closefd", json!({ "fdname": NAME }));
        }
        if let Some(beside) = self.beside.take() {
            // In most cases the file was never created, so an error is expected.
            let _ = std::fs::remove_file(beside);
        }
    }

    fn pass(&mut self, vm: &mut Vm, settings: &Settings) -> Result<(), DriveError> {
        let path = self.file.staging_path().unwrap_or_default();
        let offset = self.head.as_ref().map_or(0, Head::stream_offset);
        if vm.is_sterna() {
            let mut beside = std::path::absolute(&path)
                .map_err(|error| DriveError::file("find", &path, error))?
                .into_os_string();
            beside.push(".vm");
            self.uri = format!("file:{}", beside.display());
            self.beside = Some(beside.into());
            return Ok(());
        }
        let open = |flags: OFlags| -> Result<File, DriveError> {
            let mut options = OpenOptions::new();
            options.write(true).custom_flags(flags.bits() as i32);
            options.open(&path).map_err(|error| DriveError::file("open", &path, error))
        };
        if settings.capability("mapped-ram").is_none() {
            let mut file = open(OFlags::empty())?;
            file.seek(SeekFrom::Start(offset)).map_err(|error| DriveError::file("seek in", &path, error))?;
            vm.send_fd(NAME, file.as_fd())?;
            self.is_named = true;
            self.uri = format!("fd:{NAME}");
            return Ok(());
        }
        let set = vm.add_fd(None, open(OFlags::empty())?.as_fd(), "sterna save")?;
        self.set = Some(set);
        if self.file.is_direct() {
            vm.add_fd(Some(set), open(OFlags::DIRECT)?.as_fd(), "sterna save, direct")?;
        }
        let offset = if offset == 0 { String::new() } else { format!(",offset={offset:#x}") };
        self.uri = format!("file:/dev/fdset/{set}{offset}");
        Ok(())
    }
}

/// Whether the guest's RAM is small compared with the available memory of this host. QEMU has only one write under way
/// per thread. The page cache, flushed meanwhile, uses the disk better, but only if the image fits.
fn fits_page_cache(vm: &mut Vm) -> Result<bool, DriveError> {
    let summary = vm.execute("query-memory-size-summary", serde_json::Value::Null)?;
    let bytes = |name: &str| summary[name].as_u64().unwrap_or(0);
    let ram_bytes = bytes("base-memory").saturating_add(bytes("plugged-memory"));
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    Ok(available_bytes(&text).is_some_and(|available| ram_bytes <= available / 2))
}

/// `MemAvailable` of proc_meminfo(5), in bytes.
fn available_bytes(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_bytes_are_read_from_the_kernels_table() {
        let text = "MemTotal:       24576000 kB\nMemFree: 1 kB\nMemAvailable:   20480 kB\n";

        assert_eq!(available_bytes(text), Some(20480 * 1024));
        assert_eq!(available_bytes("MemTotal: 5 kB\n"), None);
    }
}
