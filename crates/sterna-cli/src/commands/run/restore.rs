//! Starts the guest of `sterna run` from an image: before its memory is loaded (`--lazy`), or after.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use sterna::ram::Backing;
use sterna::{Address, Status as MigrationStatus, Vm};
use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::tools::verify::refuse_damage;
use sterna_image::{Access, Format, Image, ImageError, LegacyWriter, Shape};
use sterna_pager::{
    FillRate, ImageMemory, OwnGuest, PageSource, Pager, PagerError, PagerOptions, SourceError, StoredMemory,
};
use sterna_qmp::MigrationControl;

use crate::commands::serve::uffd;
use crate::exit::{Status, Stop};
use crate::frames::Opened;
use crate::host::{Hosted, Restored, Told};
use crate::storage::Storage;
use crate::terminal;
use crate::units;

/// Interval between two looks whether the devices are loaded.
const LOOK: Duration = Duration::from_millis(1);

/// The image from which the guest starts.
#[derive(Debug, Clone, clap::Args)]
pub struct RestoreArguments {
    /// Start the guest from this image, in any format that `sterna save` writes. The machine must have the size of RAM, the
    /// vCPUs and the devices of the saved one. A guest that was paused when it was saved stays paused
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["incoming", "kernel", "same_host"])]
    pub restore: Option<PathBuf>,
    /// With --restore: start the guest before its memory is loaded. Each page is loaded when the guest needs it, the rest in the
    /// background. Until then the guest depends on the image. Needs the right to use userfaultfd
    #[arg(long, requires = "restore", conflicts_with = "prealloc")]
    pub lazy: bool,
    /// With --lazy: how fast memory is loaded in the background, such as 200MiB/s; `adaptive`: with the processor time that the
    /// guest does not need, `max`: without a pause, `off`: only the pages that the guest touches. A save or a migration
    /// loads the rest first, without a pause, at any rate [default: adaptive; off with --record]
    #[arg(long, value_name = "RATE", requires = "lazy", value_parser = uffd::fill_rate)]
    pub fill_rate: Option<FillRate>,
    /// With --lazy: write the pages that the guest touches, in their order, into this file when the VM ends
    #[arg(long, value_name = "FILE", requires = "lazy")]
    pub record: Option<PathBuf>,
    /// With --lazy: load the pages in this file first
    #[arg(long, value_name = "FILE", requires = "lazy")]
    pub restore_first: Option<PathBuf>,
    /// With --lazy: limit of the memory for frames of the image
    #[arg(long, value_name = "SIZE", requires = "lazy", default_value = "64M", value_parser = units::parse_size)]
    pub cache_limit: u64,
    /// With --lazy: directory for the unpacked copy of an image in a compressed stream [default: directory of the image]
    #[arg(long, value_name = "DIR", requires = "lazy")]
    pub spool: Option<PathBuf>,
    /// How the image is opened.
    #[command(flatten)]
    pub opened: Opened,
    /// How the image is reached if it is in an object storage.
    #[command(flatten)]
    pub storage: Storage,
}

/// An image that was opened before the machine is built.
pub struct Restoring<'a> {
    arguments: &'a RestoreArguments,
    path: &'a Path,
    access: Access,
    image: Image,
}

impl RestoreArguments {
    /// Refuses guest RAM that cannot be loaded page by page, before it is allocated.
    pub fn check_backing(&self, backing: Backing) -> Result<(), Stop> {
        if self.lazy && backing == Backing::Huge1G {
            return Err(Stop::usage(
                "--lazy cannot be used with --backing huge1g: at most 2 MiB are placed at a time. Use --backing huge2m, or \
                 leave out --lazy",
            ));
        }
        Ok(())
    }

    /// Opens the image; `None` if the guest does not start from one.
    pub fn open(&self) -> Result<Option<Restoring<'_>>, Stop> {
        let Some(path) = self.restore.as_deref() else {
            if self.opened.key.is_some() || !self.opened.base.is_empty() {
                return Err(Stop::usage("`--key` and `--base` are for `--restore`: add the image"));
            }
            return Ok(None);
        };
        let access = self.opened.access()?;
        let image = Image::open_with(path, &access).map_err(unreadable)?;
        refuse_damage(&image).map_err(unreadable)?;
        Ok(Some(Restoring { arguments: self, path, access, image }))
    }
}

impl Restoring<'_> {
    /// Loads the guest, and starts it if it ran when it was saved. `stopped`: it stays paused.
    pub fn run(
        self,
        (control, vm, restored): (&Arc<MigrationControl>, &Hosted, &Arc<Restored>),
        stopped: bool,
    ) -> Result<(), Stop> {
        let should_run = !stopped && was_running(&self.image);
        restored.begin(self.image.path_name(), control);
        let failed = |error: sterna_qmp::QmpError| Stop::failed(error.to_string());
        // A guest that has not arrived does not start by itself then.
        control.stop().map_err(failed)?;
        let is_lazy = self.arguments.lazy;
        let uuid = self.image.shape().configuration.uuid.is_some();
        control.set_capabilities(&[("validate-uuid".to_owned(), uuid)]).map_err(failed)?;
        match is_lazy {
            true => self.lazily(control, vm, restored)?,
            false if self.image.format() == Format::MappedRam => self.load_file(control, restored)?,
            false => self.load_stream(control, restored)?,
        }
        control.set_capabilities(&[("validate-uuid".to_owned(), false)]).map_err(failed)?;
        if should_run {
            control.cont().map_err(failed)?;
        }
        let time = restored.can_run();
        terminal::note(&format!(
            "sterna: the guest can run after {}{}",
            units::seconds(time.as_secs_f64()),
            if is_lazy { "; its memory is loaded meanwhile" } else { "" }
        ));
        Ok(())
    }

    /// Loads a mapped-ram image by several threads.
    fn load_file(&self, control: &Arc<MigrationControl>, restored: &Restored) -> Result<(), Stop> {
        let failed = |error: sterna_qmp::QmpError| Stop::failed(error.to_string());
        let mapped = |on| [("mapped-ram".to_owned(), on), ("multifd".to_owned(), on)];
        control.set_capabilities(&mapped(true)).map_err(failed)?;
        let path = std::path::absolute(self.path).map_err(|error| Stop::cannot_read(self.path, &error))?;
        control.listen(&Address::File { path, offset: 0 }).map_err(failed)?;
        wait(control, restored, None)?;
        control.set_capabilities(&mapped(false)).map_err(failed)
    }

    /// Loads the stream of an image, which is decompressed and checked on the way.
    fn load_stream(&self, control: &Arc<MigrationControl>, restored: &Restored) -> Result<(), Stop> {
        let (path, access) = (self.path.to_owned(), self.access.clone());
        let feed = move |out: File| {
            let options =
                ConvertOptions { target: Some(Format::Legacy), access, ..ConvertOptions::default() };
            convert(Input::File(path), Output::Pipe(Box::new(out)), &options).map(drop)
        };
        receive(control, restored, Box::new(feed))
    }

    /// Serves the memory page by page, and loads the devices.
    fn lazily(
        self,
        control: &Arc<MigrationControl>,
        vm: &Hosted,
        restored: &Arc<Restored>,
    ) -> Result<(), Stop> {
        if let Some(device) = vm.shares_ram_with() {
            return Err(Stop::usage(format!(
                "--lazy cannot be used with {device}: another process would find missing pages empty. Leave out --lazy, or \
                 the device"
            )));
        }
        let shape = self.image.shape().clone();
        let offsets = offsets(&shape, vm)?;
        let ram = vm.ram();
        let working_set = self.arguments.restore_first.as_deref().map(uffd::read_working_set).transpose()?;
        let is_recorded = self.arguments.record.is_some();
        let default = if is_recorded { FillRate::Off } else { FillRate::Adaptive };
        let options = PagerOptions {
            cache_limit_bytes: self.arguments.cache_limit,
            fill: self.arguments.fill_rate.unwrap_or(default),
            working_set,
            record: is_recorded,
            ..PagerOptions::default()
        };
        let name = self.path.display().to_string();
        let events = Arc::new(Told(Arc::clone(restored)));
        let source = source(self.image, self.arguments.spool.as_deref())?;
        // The stream has no page, and an unsent page of fresh memory is not touched.
        ram.blocks().iter().for_each(sterna::ram::RamBlock::declare_fresh);
        let pager = Pager::serve_own(source, OwnGuest { name, ram, offsets, events }, options);
        restored.set_pager(pager.map_err(|error| match error {
            PagerError::OtherWorkingSet { .. } | PagerError::OtherMemory { .. } => {
                Stop::unreadable(error.to_string())
            }
            error => Stop::failed(format!("--lazy cannot be used: {error}")),
        })?);
        let feed = move |out: File| {
            let writer = LegacyWriter::new(out, "the devices", &shape)?;
            let mut out = writer.finish(&shape)?;
            out.flush().map_err(|source| ImageError::Io {
                file: "the devices".to_owned(),
                call: "write",
                source,
            })
        };
        receive(control, restored, Box::new(feed))
    }
}

/// Writes the recorded working set, if one was asked for, when the guest has ended.
pub fn record(arguments: &RestoreArguments, restored: &Restored) -> Result<(), Stop> {
    match (&arguments.record, restored.end()) {
        (Some(path), Some(recorded)) => uffd::write_working_set(path, &recorded),
        _ => Ok(()),
    }
}

/// The memory in the image.
fn source(image: Image, spool: Option<&Path>) -> Result<Arc<dyn PageSource>, Stop> {
    let unreadable = |error: SourceError| Stop::unreadable(error.to_string());
    if let Some(stored) = image.stored() {
        return Ok(Arc::new(StoredMemory::new(Arc::clone(stored)).map_err(unreadable)?));
    }
    let path = PathBuf::from(image.path_name());
    drop(image);
    Ok(Arc::new(ImageMemory::open(&path, spool).map_err(unreadable)?))
}

/// For each RAM block of the machine the offset in the image's memory.
fn offsets(shape: &Shape, vm: &Hosted) -> Result<Vec<u64>, Stop> {
    let ram = vm.ram();
    let saved = &shape.ram.blocks;
    let unlike = |what: String| {
        Stop::unreadable(format!(
            "{what}: start the machine with the RAM of the saved one (--ram {})",
            units::bytes(saved.iter().map(|block| block.length_bytes).sum())
        ))
    };
    let place = |block: &sterna::ram::RamBlock| {
        let mut offset = 0;
        for one in saved {
            if one.name == block.name() {
                return match one.length_bytes == block.len_bytes() {
                    true => Ok(offset),
                    false => Err(unlike(format!(
                        "the RAM block {:?} has {} bytes in the image, and {} here",
                        one.name,
                        one.length_bytes,
                        block.len_bytes()
                    ))),
                };
            }
            offset += one.length_bytes;
        }
        Err(unlike(format!("the image has no RAM block {:?}", block.name())))
    };
    if let Some(more) = saved.iter().find(|one| ram.blocks().iter().all(|block| block.name() != one.name)) {
        return Err(unlike(format!("the machine has no RAM block {:?}", more.name)));
    }
    ram.blocks().iter().map(place).collect()
}

/// Whether the guest ran when it was saved.
fn was_running(image: &Image) -> bool {
    match image.libvirt_header() {
        Some(header) => header.was_running != 0,
        None => image.shape().was_running(),
    }
}

type Feed = Box<dyn FnOnce(File) -> Result<(), ImageError> + Send>;

/// Loads a stream that `feed` writes.
fn receive(control: &Arc<MigrationControl>, restored: &Restored, feed: Feed) -> Result<(), Stop> {
    let failed = |error: std::io::Error| Stop::failed(format!("cannot load the image: {error}"));
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let address = Address::from_connected(OwnedFd::from(theirs));
    let address = address.map_err(|error| Stop::failed(error.to_string()))?;
    control.listen(&address).map_err(|error| Stop::failed(error.to_string()))?;
    let out = File::from(OwnedFd::from(ours));
    let feeding = std::thread::Builder::new().name("feeding".to_owned()).spawn(move || feed(out));
    wait(control, restored, Some(feeding.map_err(failed)?))
}

/// Waits until the guest is loaded.
fn wait(
    control: &MigrationControl,
    restored: &Restored,
    feeding: Option<JoinHandle<Result<(), ImageError>>>,
) -> Result<(), Stop> {
    loop {
        if let Some(why) = restored.failure() {
            terminal::note(&format!("sterna: error: the guest cannot be loaded: {why}"));
            // A thread may wait without end for a page.
            process::exit(Status::Failed.code().into());
        }
        let Some(incoming) = control.incoming() else {
            return Err(Stop::failed("the guest's arrival was cancelled"));
        };
        match incoming.status() {
            MigrationStatus::Completed => break,
            MigrationStatus::Failed | MigrationStatus::Cancelled => {
                // The image's own error is the cause of both.
                let fed = feeding.map(JoinHandle::join);
                if let Some(Ok(Err(error))) = fed
                    && !is_closed(&error)
                {
                    return Err(unreadable(error));
                }
                let why = control.query()["error-desc"].as_str().map(str::to_owned);
                let why = why.unwrap_or_else(|| "no reason was given".to_owned());
                return Err(Stop::failed(format!("the image cannot be loaded: {why}")));
            }
            _ => std::thread::sleep(LOOK),
        }
    }
    match feeding.map(JoinHandle::join) {
        Some(Ok(Err(error))) if !is_closed(&error) => Err(unreadable(error)),
        Some(Err(_)) => Err(Stop::failed("the thread that reads the image has panicked")),
        _ => Ok(()),
    }
}

/// Whether the reader has closed the connection.
fn is_closed(error: &ImageError) -> bool {
    matches!(error, ImageError::Io { source, .. } if source.kind() == std::io::ErrorKind::BrokenPipe)
}

fn unreadable(error: ImageError) -> Stop {
    Stop::unreadable(error.to_string())
}
