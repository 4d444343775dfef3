//! From any form of image to any other, in one pass where that can be, with bounded memory.
//!
//! | from | to | how |
//! | --- | --- | --- |
//! | legacy | legacy | the stream byte for byte, checked as it passes; decompressed and compressed anew |
//! | legacy | mapped-ram | records to their places, by several threads |
//! | mapped-ram | legacy | blocks read ahead in file order, every page as a record |
//! | mapped-ram | mapped-ram | laid out anew; pages shared (reflinks) or copied by several threads, holes kept |
//!
//! The machine is never touched: devices and other opaque bytes go over as they are; only the list of
//! capabilities and what the description says of it follow the form (`specs/mapped-ram.md §7`).
//!
//! What goes over is checked as it passes, by the rules of [`verify`]: a damaged image is refused
//! ([`ImageError::Damaged`]) unless [`ConvertOptions::force_damaged`] says otherwise, and then [`Converted::damage`] says what
//! was left as it is. Nothing is read twice for that but bitmaps and heads, and a legacy file that goes into a
//! pipe, which is checked before the first byte. From a pipe into a pipe the end of the stream is held back until it is judged:
//! what came without it is loaded by nobody. See [`structure`] for what it cannot see.

mod out;
mod relayout;
mod spread;
mod target;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_transport::{CreateOptions, Direct};
use sterna_wire::PAGE_SIZE;
use sterna_wire::mapped_ram::PAGES_ALIGNMENT;

use crate::ImageError;
use crate::model::{Container, Form, IGNORE_SHARED, ImageKind, Shape};
use crate::read::begun::Begun;
use crate::read::body::{End, RecordSink};
use crate::read::image::{check_unchanged, open_file};
use crate::read::tee::Tee;
use crate::read::{Image, PageVisitor};
use crate::tools::finding::Finding;
use crate::tools::verify::{self, structure, structure_of_stream};
use crate::write::{Envelope, LegacyWriter, MappedOptions, MappedWriter};
use out::{Out, Shared};
pub use target::Target;

/// Where an image comes from.
pub enum Input {
    /// A file.
    File(PathBuf),
    /// A pipe with a bare legacy stream, compressed or not.
    Pipe(Box<dyn Read + Send>),
}

/// Where an image goes.
pub enum Output {
    /// A file: complete or absent.
    File(PathBuf),
    /// A pipe, for bare legacy streams.
    Pipe(Box<dyn Write + Send>),
}

/// How it is converted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertOptions {
    /// What becomes of it; none for mapped-ram in the container that it has.
    pub target: Option<Target>,
    /// The domain's XML for libvirt's container; none to keep that of the source.
    pub xml: Option<Vec<u8>>,
    /// The cookie for libvirt's container; none to keep that of the source.
    pub cookie: Option<Vec<u8>>,
    /// Replace what lies in the target's place.
    pub replace: bool,
    /// Past the page cache, reading and writing.
    pub direct: Direct,
    /// Threads that copy, compress or write; 0 for one for each CPU.
    pub threads: usize,
    /// Alignment of the pages of a mapped-ram image, in bytes.
    pub alignment: u64,
    /// Convert an image that is damaged, too, as far as it can be read: what is damaged goes over as it is, but for a
    /// description that is truncated, which is left out.
    pub force_damaged: bool,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            target: None,
            xml: None,
            cookie: None,
            replace: false,
            direct: Direct::Wanted,
            threads: 0,
            alignment: PAGES_ALIGNMENT,
            force_damaged: false,
        }
    }
}

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// The kind of the source, such as `libvirt-zstd`.
    pub from: String,
    /// The kind of the result.
    pub to: String,
    /// Sum of all RAM blocks, in bytes.
    pub ram_bytes: u64,
    /// Pages given to the result with their content (of a live stream, some of them several times).
    pub data_pages: u64,
    /// Pages given to the result as zero; of a stream that went over byte for byte, also such.
    pub zero_pages: u64,
    /// Bytes of pages that the result shares with the source (reflinks).
    pub shared_bytes: u64,
    /// Length of the result in bytes; 0 for a pipe.
    pub target_bytes: u64,
    /// What is damaged in the source, and went over as it is ([`ConvertOptions::force_damaged`]).
    pub damage: Vec<Finding>,
}

/// Converts.
///
/// # Errors
/// [`ImageError`]: nothing is in the target's place that was not there before.
pub fn convert(from: Input, to: Output, options: &ConvertOptions) -> Result<Converted, ImageError> {
    let name = match &to {
        Output::File(path) => path.display().to_string(),
        Output::Pipe(_) => "standard output".to_owned(),
    };
    if let Output::File(path) = &to {
        check_place(&from, path, options)?;
    }
    let tee = Tee::default();
    let (begun, source) = match from {
        Input::File(path) => {
            let source = open_file(&path)?;
            let file = path.display().to_string();
            let stamp = source.stamp().map_err(|error| ImageError::io(&file, "fstat", error))?;
            (Begun::of_source(&source, &file, Some(tee.clone()))?, Some((source, stamp, file)))
        }
        Input::Pipe(pipe) => (Begun::of_pipe(pipe, "standard input", Some(tee.clone()))?, None),
    };
    let kind = begun.kind.clone();
    let target = options.target.unwrap_or(Target::default_for(&kind));
    let envelope = envelope(&kind, target, options)?;
    let counts = Counts::default();
    let job = Job { to, name, target, envelope, options, counts: &counts };
    let (shape, damage) = match (kind.form, source) {
        (Form::Mapped, Some((source, stamp, _))) => {
            tee.off();
            let image = Image::finish(begun, source, stamp, false)?;
            let damage = job.take_mapped(&image)?;
            (image.shape().clone(), damage)
        }
        (_, Some((source, stamp, file))) => {
            let check = |shape: &Shape, end: End| {
                check_unchanged(&*source, stamp, &file)?;
                structure_of_stream(Some(&*source), &file, &kind, shape, end)
            };
            // Which blocks are left out is only known at the end of the stream, and needed at the start.
            let skipped = begun.head.shape.has_capability(IGNORE_SHARED) && target.form() == Form::Mapped;
            let open = || Image::open_source(source.clone(), &file);
            let known = if skipped { Some(open()?) } else { None };
            // A pipe's reader cannot be told that what it got was damaged.
            if matches!(job.to, Output::Pipe(_)) {
                job.examine(&open()?)?;
            }
            job.take_legacy(begun, &tee, known.as_ref().map(Image::shape), &check)?
        }
        (_, None) if begun.head.shape.has_capability(IGNORE_SHARED) && target.form() == Form::Mapped => {
            let text = "a stream with x-ignore-shared becomes mapped-ram only from a file, not through a pipe: \
                        which blocks it leaves out is known at its end, and needed at the start";
            return Err(ImageError::Request(text.to_owned()));
        }
        (_, None) => {
            let file = begun.file_name().to_owned();
            let check = |shape: &Shape, end: End| structure_of_stream(None, &file, &kind, shape, end);
            job.take_legacy(begun, &tee, None, &check)?
        }
    };
    Ok(Converted {
        from: kind.name(),
        to: target.name(),
        ram_bytes: shape.ram_bytes(),
        data_pages: counts.data.load(Ordering::Relaxed),
        zero_pages: counts.zero.load(Ordering::Relaxed),
        shared_bytes: counts.shared.load(Ordering::Relaxed),
        target_bytes: counts.target_bytes.load(Ordering::Relaxed),
        damage,
    })
}

/// What was moved so far.
#[derive(Debug, Default)]
struct Counts {
    data: AtomicU64,
    zero: AtomicU64,
    shared: AtomicU64,
    target_bytes: AtomicU64,
}

/// Looks at a legacy stream that was read to its end.
type Check<'a> = dyn Fn(&Shape, End) -> Result<Vec<Finding>, ImageError> + 'a;

/// One conversion whose source has begun.
struct Job<'a> {
    to: Output,
    name: String,
    target: Target,
    envelope: Option<Envelope>,
    options: &'a ConvertOptions,
    counts: &'a Counts,
}

impl Job<'_> {
    fn take_mapped(mut self, image: &Image) -> Result<Vec<Finding>, ImageError> {
        let damage = self.examine(image)?;
        if self.target.form() == Form::Mapped {
            let writer = self.mapped_writer(image.shape())?;
            relayout::copy(image, &writer, self.options, self.counts)?;
            image.check_unchanged()?;
            self.complete_mapped(&writer, image.shape())?;
            return Ok(damage);
        }
        let (counts, name) = (self.counts, self.name.clone());
        let shape = image.shape();
        let mut writer = LegacyWriter::new(self.out()?, name.as_str(), shape)?;
        relayout::visit(image, self.options.direct, &mut Counted { to: &mut writer, counts })?;
        image.check_unchanged()?;
        self.complete_out(writer.finish(shape)?, shape)?;
        Ok(damage)
    }

    /// What is damaged in `image`; refused unless that was forced.
    fn examine(&self, image: &Image) -> Result<Vec<Finding>, ImageError> {
        check_whole(image.shape(), image.path_name(), image.end())?;
        image.check_bitmaps()?;
        self.damage(image.path_name(), structure(image)?)
    }

    /// Those of `findings` that are damage; refused unless that was forced.
    fn damage(&self, file: &str, findings: Vec<Finding>) -> Result<Vec<Finding>, ImageError> {
        let damage = verify::damage(findings);
        if !self.options.force_damaged {
            verify::refuse(file, &damage)?;
        }
        Ok(damage)
    }

    /// `known` is the shape if it had to be known beforehand.
    fn take_legacy(
        mut self,
        begun: Begun,
        tee: &Tee,
        known: Option<&Shape>,
        check: &Check<'_>,
    ) -> Result<(Shape, Vec<Finding>), ImageError> {
        let file = begun.file_name().to_owned();
        if self.target.form() == Form::Legacy {
            let out = Shared::new(self.out()?, &self.name);
            tee.to(Box::new(out.clone())).map_err(|error| crate::write::failed(&self.name, error))?;
            let (shape, end) = begun.finish(&mut Counting(self.counts))?;
            check_whole(&shape, &file, end)?;
            let damage = self.damage(&file, check(&shape, end)?)?;
            tee.release().map_err(|error| crate::write::failed(&self.name, error))?;
            tee.off();
            self.complete_out(out.into_inner()?, &shape)?;
            return Ok((shape, damage));
        }
        tee.off();
        let head = known.unwrap_or(&begun.head.shape).clone();
        let writer = self.mapped_writer(&head)?;
        let (mut shape, end) = spread::spread(begun, &writer, self.options.threads, self.counts)?;
        check_whole(&shape, &file, end)?;
        let damage = self.damage(&file, check(&shape, end)?)?;
        shape.ram.blocks = head.ram.blocks;
        self.complete_mapped(&writer, &shape)?;
        Ok((shape, damage))
    }

    fn mapped_writer(&self, shape: &Shape) -> Result<MappedWriter, ImageError> {
        let Output::File(path) = &self.to else {
            let text = "a mapped-ram image needs a file, not a pipe: use --format legacy or name a file";
            return Err(ImageError::Request(text.to_owned()));
        };
        let options = MappedOptions {
            file: self.options.create(),
            alignment: self.options.alignment,
            start_offset: 0,
            envelope: self.envelope.clone(),
        };
        MappedWriter::create(path, shape, options)
    }

    fn complete_mapped(&self, writer: &MappedWriter, shape: &Shape) -> Result<(), ImageError> {
        writer.complete(shape)?;
        self.counts.target_bytes.store(writer.file().len_bytes()?, Ordering::Relaxed);
        Ok(())
    }

    /// An output for a stream.
    fn out(&mut self) -> Result<Out, ImageError> {
        let (compression, threads) = (self.target.compression(), threads(self.options.threads));
        match &mut self.to {
            Output::File(path) => {
                Out::file(path, self.options.create(), self.envelope.clone(), compression, threads)
            }
            Output::Pipe(pipe) => {
                Ok(Out::pipe(std::mem::replace(pipe, Box::new(std::io::sink())), compression, threads))
            }
        }
    }

    fn complete_out(&self, out: Out, shape: &Shape) -> Result<(), ImageError> {
        let bytes = out.complete(shape, &self.name)?;
        self.counts.target_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl ConvertOptions {
    fn create(&self) -> CreateOptions {
        CreateOptions { direct: self.direct, replace: self.replace, keep_bytes: 0 }
    }
}

fn threads(wanted: usize) -> usize {
    let all = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(16);
    if wanted == 0 { all() } else { wanted.min(256) }
}

/// A file that is there is refused, and the source itself in any case.
fn check_place(from: &Input, place: &Path, options: &ConvertOptions) -> Result<(), ImageError> {
    let file = || place.display().to_string();
    let Ok(target) = fs::metadata(place) else { return Ok(()) };
    if let Input::File(source) = from
        && let Ok(source) = fs::metadata(source)
        && (source.dev(), source.ino()) == (target.dev(), target.ino())
    {
        return Err(ImageError::SameFile { file: file() });
    }
    if options.replace { Ok(()) } else { Err(ImageError::Exists { file: file() }) }
}

/// libvirt's container around the result, if it gets one.
fn envelope(
    kind: &ImageKind,
    target: Target,
    options: &ConvertOptions,
) -> Result<Option<Envelope>, ImageError> {
    if !target.is_libvirt() {
        if options.xml.is_some() || options.cookie.is_some() {
            let text = format!("only libvirt images contain XML and cookie, {} does not", target.name());
            return Err(ImageError::Request(text));
        }
        return Ok(None);
    }
    let mut envelope = match (&kind.container, &options.xml) {
        (Container::Libvirt(header), _) => Envelope::of(header),
        (Container::Bare, Some(xml)) => Envelope::new(xml.clone(), None)?,
        (Container::Bare, None) => {
            let text = "a bare image has no domain XML, and only libvirt can make one: give --xml with the output of \
                        virsh dumpxml --migratable --inactive";
            return Err(ImageError::Request(text.to_owned()));
        }
    };
    if let Some(xml) = &options.xml {
        envelope.xml = Envelope::new(xml.clone(), None)?.xml;
    }
    if let Some(cookie) = &options.cookie {
        envelope.cookie = Envelope::new(envelope.xml.clone(), Some(cookie.clone()))?.cookie;
    }
    Ok(Some(envelope))
}

/// An image whose devices are truncated is not converted.
fn check_whole(shape: &Shape, file: &str, end: End) -> Result<(), ImageError> {
    if shape.has_eof {
        return Ok(());
    }
    let file = file.to_owned();
    if end.is_end_unsure {
        let rule = "its sections have no footers and no description follows, so it is unknown whether it is complete";
        return Err(ImageError::Unsupported {
            file,
            rule: rule.to_owned(),
            paragraph: "specs/mapped-ram.md §1.6",
        });
    }
    Err(ImageError::Torn { file, offset: end.stream_end, what: "the devices' state" })
}

/// Counts pages on their way.
struct Counted<'a> {
    to: &'a mut dyn PageVisitor,
    counts: &'a Counts,
}

impl PageVisitor for Counted<'_> {
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        self.counts.data.fetch_add((content.len() / PAGE_SIZE) as u64, Ordering::Relaxed);
        self.to.pages(block, first, content)
    }

    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        self.counts.zero.fetch_add(count, Ordering::Relaxed);
        self.to.zero(block, first, count)
    }
}

/// Counts records that go over byte for byte.
struct Counting<'a>(&'a Counts);

impl RecordSink for Counting<'_> {
    fn page(&mut self, _: usize, _: u64, _: &[u8; PAGE_SIZE]) -> Result<(), ImageError> {
        self.0.data.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn zero(&mut self, _: usize, _: u64) -> Result<(), ImageError> {
        self.0.zero.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn delta(&mut self, _: usize, _: u64, _: &[u8]) -> Result<(), ImageError> {
        self.0.data.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
