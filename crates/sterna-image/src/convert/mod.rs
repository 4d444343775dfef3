//! Converts any form of image to any other, with bounded memory, usually in one pass.
//!
//! | from | to | how |
//! | --- | --- | --- |
//! | legacy | legacy | copies the stream byte for byte and checks it; decompresses and compresses it again |
//! | legacy | mapped-ram | several threads write the records' pages to their places |
//! | mapped-ram | legacy | reads blocks ahead in file order, and writes every page as a record |
//! | mapped-ram | mapped-ram | makes a new layout; several threads share (reflinks) or copy pages, and keep holes |
//!
//! The machine does not change: devices and other opaque bytes are copied verbatim. Only the list of capabilities,
//! and the description's part about it, follow the new form (`specs/mapped-ram.md §7`).
//!
//! The converter checks the source while it copies, by the rules of [`verify`]. It refuses a damaged image
//! ([`ImageError::Damaged`]) unless [`ConvertOptions::force_damaged`] is set. In that case, [`Converted::damage`]
//! lists the damage that was copied unchanged.
//!
//! For these checks, only bitmaps and heads are read twice. One exception: a legacy file that is written to a pipe is
//! checked completely before the first byte. From a pipe to a pipe, the converter holds back the end of the stream
//! until the check has passed. A stream without its end cannot be loaded. See [`structure`] for the limits of these
//! checks.

mod directory;
mod framed;
mod out;
mod relayout;
mod spread;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_store::ImageWriter;
use sterna_transport::{CreateOptions, Direct};
use sterna_wire::PAGE_SIZE;
use sterna_wire::mapped_ram::PAGES_ALIGNMENT;

use crate::ImageError;
use crate::format::{Form, Format};
use crate::model::{Domain, DomainMachine, IGNORE_SHARED, LibvirtHeader, Shape};
use crate::read::begun::Begun;
use crate::read::body::{End, RecordSink};
use crate::read::framed::Framed;
use crate::read::image::check_unchanged;
use crate::read::open::open_with;
use crate::read::tee::Tee;
use crate::read::visitor::PageVisitor;
use crate::read::{Access, Image, ReadAt, Stamp};
use crate::tools::finding::Finding;
use crate::tools::verify::{self, structure, structure_of_stream};
use crate::write::{Envelope, LegacyWriter, MappedOptions, MappedWriter};
pub use directory::{ConvertedDirectory, convert_directory, copy_image, directory_kind, write_directory};
pub use framed::FrameOptions;
use out::{Out, Shared};

/// The source image of a conversion.
pub enum Input {
    /// An image file in any format.
    File(PathBuf),
    /// A pipe with a bare legacy stream, compressed or not.
    Pipe(Box<dyn Read + Send>),
}

/// The target of a conversion.
pub enum Output {
    /// A file. It is complete or absent at any time.
    File(PathBuf),
    /// A pipe, for bare legacy streams.
    Pipe(Box<dyn Write + Send>),
}

/// Options of a conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertOptions {
    /// The target format. None selects mapped-ram, in libvirt's container if the source has one.
    pub target: Option<Format>,
    /// The domain's XML for libvirt's container; none keeps the source's XML.
    pub xml: Option<Vec<u8>>,
    /// The cookie for libvirt's container; none keeps the source's cookie.
    pub cookie: Option<Vec<u8>>,
    /// Replace an existing target file, and accept the XML of another machine.
    pub replace: bool,
    /// Whether reads and writes bypass the page cache.
    pub direct: Direct,
    /// Threads that copy, compress or write; 0 means one for each CPU, at most 16.
    pub threads: usize,
    /// Alignment of the pages of a mapped-ram image, in bytes.
    pub alignment: u64,
    /// Also convert a damaged image, as far as it can be read.
    ///
    /// Damaged parts are copied unchanged, except a truncated description, which is left out.
    pub force_damaged: bool,
    /// The key of an encrypted source, and the bases of a source that is a layer.
    pub access: Access,
    /// Options of a target in Sterna's own format.
    pub frames: FrameOptions,
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
            access: Access::default(),
            frames: FrameOptions::default(),
        }
    }
}

/// The result of a conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// The format of the source.
    pub from: Format,
    /// The format of the result.
    pub to: Format,
    /// Sum of all RAM blocks, in bytes.
    pub ram_bytes: u64,
    /// Pages written to the target with their content. A page of a live stream can count several times.
    pub data_pages: u64,
    /// Pages written to the target as zero. In a stream that is copied byte for byte, these are its zero records.
    pub zero_pages: u64,
    /// Bytes of pages that the result shares with the source (reflinks).
    pub shared_bytes: u64,
    /// Length of the result in bytes; 0 for a pipe.
    pub target_bytes: u64,
    /// Damage of the source that was copied unchanged ([`ConvertOptions::force_damaged`]).
    pub damage: Vec<Finding>,
}

/// Converts the image `from` to `to`.
///
/// # Errors
/// [`ImageError`]: the target's path is unchanged.
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
            let source = open_with(&path, &options.access)?;
            let file = path.display().to_string();
            let stamp = source.stamp().map_err(|error| ImageError::io(&file, "fstat", error))?;
            (Begun::of_source(&source, &file, Some(tee.clone()))?, Some((source, stamp, file)))
        }
        Input::Pipe(pipe) => (Begun::of_pipe(pipe, "standard input", Some(tee.clone()))?, None),
    };
    let (format, header) = (begun.format, begun.header.clone());
    let target =
        options.target.unwrap_or(if format.is_libvirt() { Format::LibvirtSparse } else { Format::MappedRam });
    let envelope = envelope(header.as_ref(), target, options)?;
    check_domain(header.as_ref(), &begun.head.shape, options)?;
    let is_stored = source.as_ref().is_some_and(|(source, ..)| source.stored().is_some());
    let (begun, source, format) = as_stream(begun, source, target, &tee)?;
    let counts = Counts::default();
    let job = Job { to, name, target, envelope, options, counts: &counts };
    let (shape, damage) = match (format.form(), source) {
        (Form::Mapped, Some((source, stamp, _))) => {
            tee.off();
            let image = Image::finish(begun, source, stamp, false)?;
            let damage = job.take_mapped(&image)?;
            (image.shape().clone(), damage)
        }
        (_, Some((source, stamp, file))) => {
            let check = |shape: &Shape, end: End| {
                check_unchanged(&*source, stamp, &file)?;
                structure_of_stream(Some(&*source), &file, format, shape, end)
            };
            // Only the end of the stream tells which blocks are left out, but the target needs this at its start.
            let skipped = begun.head.shape.has_capability(IGNORE_SHARED) && target.form() == Form::Mapped;
            let open = || Image::open_source(source.clone(), &file);
            let known = if skipped { Some(open()?) } else { None };
            // Bytes in a pipe cannot be taken back if damage is found later. Therefore the source is checked first.
            if matches!(job.to, Output::Pipe(_)) {
                job.examine(&open()?)?;
            }
            job.take_legacy(begun, &tee, known.as_ref().map(Image::shape), &check)?
        }
        (_, None) if begun.head.shape.has_capability(IGNORE_SHARED) && target.form() == Form::Mapped => {
            let text = "a stream with x-ignore-shared can be converted to mapped-ram only from a file, not from a \
                        pipe: the left-out blocks are known only at its end, but needed at the start";
            return Err(ImageError::Request(text.to_owned()));
        }
        (_, None) => {
            let file = begun.file_name().to_owned();
            let check = |shape: &Shape, end: End| structure_of_stream(None, &file, format, shape, end);
            job.take_legacy(begun, &tee, None, &check)?
        }
    };
    Ok(Converted {
        from: if is_stored { Format::Sterna } else { format },
        to: target,
        ram_bytes: shape.ram_bytes(),
        data_pages: counts.data.load(Ordering::Relaxed),
        zero_pages: counts.zero.load(Ordering::Relaxed),
        shared_bytes: counts.shared.load(Ordering::Relaxed),
        target_bytes: counts.target_bytes.load(Ordering::Relaxed),
        damage,
    })
}

/// A source: its bytes, its stamp, and its name.
type Source = (Arc<dyn ReadAt>, Stamp, String);

/// Takes the legacy stream of an image in Sterna's format in place of its view, if the target is a stream, too.
///
/// The result then has the bytes of the stream that the image was made from.
fn as_stream(
    begun: Begun,
    source: Option<Source>,
    target: Format,
    tee: &Tee,
) -> Result<(Begun, Option<Source>, Format), ImageError> {
    let format = begun.format;
    let Some((view, stamp, name)) = source else { return Ok((begun, None, format)) };
    let is_wanted = target.form() == Form::Legacy;
    let stream = if is_wanted { Framed::stream_of(&view)? } else { None };
    match stream {
        Some(stream) => {
            tee.restart();
            let mut again = Begun::of_source(&stream, &name, Some(tee.clone()))?;
            again.header = begun.header;
            let format = again.format;
            Ok((again, Some((stream, stamp, name)), format))
        }
        None => Ok((begun, Some((view, stamp, name)), format)),
    }
}

/// Counts of the pages and bytes that were written so far.
#[derive(Debug, Default)]
struct Counts {
    data: AtomicU64,
    zero: AtomicU64,
    shared: AtomicU64,
    target_bytes: AtomicU64,
}

/// Checks a legacy stream after it was read to its end.
type Check<'a> = dyn Fn(&Shape, End) -> Result<Vec<Finding>, ImageError> + 'a;

/// One conversion whose source's head is already read.
struct Job<'a> {
    to: Output,
    name: String,
    target: Format,
    envelope: Option<Envelope>,
    options: &'a ConvertOptions,
    counts: &'a Counts,
}

impl Job<'_> {
    fn take_mapped(mut self, image: &Image) -> Result<Vec<Finding>, ImageError> {
        let damage = self.examine(image)?;
        if self.target == Format::Sterna {
            let writer = self.image_writer(image.shape(), image.stored().map(|stored| stored.kind()))?;
            let threads = threads(self.options.threads);
            let bytes = match image.stored().filter(|_| self.options.xml.is_none()) {
                Some(stored) => framed::of_stored(stored, writer, threads, self.counts)?,
                None => framed::of_mapped(image, writer, threads, self.counts)?,
            };
            self.counts.target_bytes.store(bytes, Ordering::Relaxed);
            return Ok(damage);
        }
        if image.stored().is_some() && self.target == image.view_format() && self.is_layout_kept() {
            let threads = threads(self.options.threads);
            if let Output::File(path) = &self.to {
                let bytes =
                    framed::verbatim::write(image, path, self.options.create(), threads, self.counts)?;
                self.counts.target_bytes.store(bytes, Ordering::Relaxed);
                return Ok(damage);
            }
        }
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

    /// Whether the options ask for nothing that changes the bytes of a mapped-ram image.
    fn is_layout_kept(&self) -> bool {
        let options = self.options;
        options.alignment == PAGES_ALIGNMENT && options.xml.is_none() && options.cookie.is_none()
    }

    /// Returns the damage of `image`. Refuses the image if it has damage, unless that is forced.
    fn examine(&self, image: &Image) -> Result<Vec<Finding>, ImageError> {
        check_whole(image.shape(), image.path_name(), image.end())?;
        image.check_bitmaps()?;
        self.damage(image.path_name(), structure(image)?)
    }

    /// Returns the damage among `findings`. Refuses the image if there is any, unless that is forced.
    fn damage(&self, file: &str, findings: Vec<Finding>) -> Result<Vec<Finding>, ImageError> {
        let damage = verify::damage(findings);
        if !self.options.force_damaged {
            verify::refuse(file, &damage)?;
        }
        Ok(damage)
    }

    /// `known` is the shape of the source, if an earlier pass had to read it.
    fn take_legacy(
        mut self,
        begun: Begun,
        tee: &Tee,
        known: Option<&Shape>,
        check: &Check<'_>,
    ) -> Result<(Shape, Vec<Finding>), ImageError> {
        let file = begun.file_name().to_owned();
        if self.target == Format::Sterna {
            let head = known.unwrap_or(&begun.head.shape).clone();
            let writer = self.image_writer(&head, None)?;
            let checked = |shape: &Shape, end: End| self.damage(&file, check(shape, end)?);
            let threads = threads(self.options.threads);
            let envelope = self.envelope.as_ref();
            let (shape, damage, bytes) =
                framed::of_legacy(begun, tee, envelope, writer, threads, self.counts, &checked)?;
            self.counts.target_bytes.store(bytes, Ordering::Relaxed);
            return Ok((shape, damage));
        }
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

    /// The writer of an image in Sterna's own format.
    fn image_writer(&self, shape: &Shape, kind: Option<&str>) -> Result<ImageWriter, ImageError> {
        let Output::File(path) = &self.to else {
            let text =
                "an image in Sterna's format needs a file, not a pipe: use --format legacy or give a file";
            return Err(ImageError::Request(text.to_owned()));
        };
        Ok(framed::writer_at(path, framed::blocks(shape), self.options, kind.unwrap_or("qemu"))?.0)
    }

    fn mapped_writer(&self, shape: &Shape) -> Result<MappedWriter, ImageError> {
        let Output::File(path) = &self.to else {
            let text = "a mapped-ram image needs a file, not a pipe: use --format legacy or give a file";
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

    /// Makes the output for a legacy stream.
    fn out(&mut self) -> Result<Out, ImageError> {
        let (target, threads) = (self.target, threads(self.options.threads));
        match &mut self.to {
            Output::File(path) => {
                Out::file(path, self.options.create(), target, self.envelope.clone(), threads)
            }
            Output::Pipe(pipe) => {
                let pipe = std::mem::replace(pipe, Box::new(std::io::sink()));
                Ok(Out::pipe(pipe, target.compression(), threads))
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

/// Refuses an existing target unless it may be replaced. Always refuses the source itself as the target.
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

/// libvirt's container for the result; none for a bare format.
fn envelope(
    header: Option<&LibvirtHeader>,
    target: Format,
    options: &ConvertOptions,
) -> Result<Option<Envelope>, ImageError> {
    // An image in Sterna's format keeps a container: its view is libvirt's sparse image.
    if target == Format::Sterna && header.is_none() && options.xml.is_none() {
        return Ok(None);
    }
    if !target.is_libvirt() && target != Format::Sterna {
        if options.xml.is_some() || options.cookie.is_some() {
            let text = format!("only libvirt images contain XML and cookie, {target} does not");
            return Err(ImageError::Request(text));
        }
        return Ok(None);
    }
    let mut envelope = match (header, &options.xml) {
        (Some(header), _) => Envelope::of(header),
        (None, Some(xml)) => Envelope::new(xml.clone(), None)?,
        (None, None) => {
            let text = "an image without container has no domain XML, which only libvirt can create: give --xml with \
                        the output of `virsh dumpxml --migratable --inactive`";
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

/// Refuses the XML of another machine, because libvirt would fail when it restores the image.
fn check_domain(
    header: Option<&LibvirtHeader>,
    shape: &Shape,
    options: &ConvertOptions,
) -> Result<(), ImageError> {
    let Some(xml) = options.xml.as_ref().filter(|_| !options.replace) else { return Ok(()) };
    let domain = Domain::of_xml(xml);
    let blocks: Vec<_> =
        shape.ram.blocks.iter().map(|block| (block.name.clone(), block.length_bytes)).collect();
    let configuration = &shape.configuration;
    let machine = DomainMachine {
        machine_type: &configuration.machine_type,
        uuid: configuration.uuid,
        blocks: &blocks,
    };
    let of_container = || header.and_then(|header| domain.misfit_of(&Domain::of_xml(&header.xml)));
    match domain.misfit(machine).or_else(of_container) {
        Some(why) => {
            Err(ImageError::Request(format!("{why}: give the XML of the guest's machine, or --force")))
        }
        None => Ok(()),
    }
}

/// Refuses an image whose device state is truncated.
fn check_whole(shape: &Shape, file: &str, end: End) -> Result<(), ImageError> {
    if shape.has_eof {
        return Ok(());
    }
    let file = file.to_owned();
    if end.is_end_unsure {
        let rule = "its sections have no footers, and the stream has no description, so it is unknown whether it is \
                    complete";
        return Err(ImageError::Unsupported {
            file,
            rule: rule.to_owned(),
            paragraph: "specs/mapped-ram.md §1.6",
        });
    }
    Err(ImageError::Torn { file, offset: end.stream_end, what: "the devices' state" })
}

/// Counts pages that go to `to`.
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

/// Counts the records of a stream that is copied byte for byte.
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
