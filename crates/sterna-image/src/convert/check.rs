//! Checks of a conversion's source, target and container.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::request::{ConvertOptions, Input};
use crate::ImageError;
use crate::format::Format;
use crate::model::{Domain, DomainMachine, LibvirtHeader, Shape};
use crate::read::body::End;
use crate::tools::finding::Finding;
use crate::write::Envelope;

/// Checks a legacy stream after it was read to its end.
pub(super) type Check<'a> = dyn Fn(&Shape, End) -> Result<Vec<Finding>, ImageError> + 'a;

/// Refuses an existing target unless it may be replaced. Always refuses the source itself as the target.
pub(super) fn check_place(from: &Input, place: &Path, options: &ConvertOptions) -> Result<(), ImageError> {
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

/// Refuses libvirt's container in a pipe: its header is completed after the stream.
pub(super) fn check_pipe(target: Option<Format>) -> Result<(), ImageError> {
    match target.filter(|target| target.is_libvirt()) {
        Some(target) => Err(ImageError::Request(format!(
            "{target} needs a file, not a pipe, because libvirt's header is completed after the stream: give a file, or \
             use --format legacy for a stream without container"
        ))),
        None => Ok(()),
    }
}

/// libvirt's container for the result; none for a bare format.
pub(super) fn envelope(
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
pub(super) fn check_domain(
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
pub(super) fn check_whole(shape: &Shape, file: &str, end: End) -> Result<(), ImageError> {
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
