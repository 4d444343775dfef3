//! The converter, the reader and the verifier support every format of the table.

use std::fs;

use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::tools::coverage::Coverage;
use sterna_image::tools::inspect;
use sterna_image::tools::verify::{VerifyOptions, verify};
use sterna_image::{Format, Image, Preview};

use crate::common::{legacy, machine};

#[test]
fn converter_writes_every_format_and_reader_and_verifier_name_it() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    fs::write(&source, legacy(&machine())).unwrap();
    for &format in Format::ALL {
        let place = directory.path().join(format.name());
        let xml = format.is_libvirt().then(|| b"<domain><name>a</name></domain>".to_vec());
        let options = ConvertOptions { target: Some(format), xml, threads: 1, ..ConvertOptions::default() };

        let done = convert(Input::File(source.clone()), Output::File(place.clone()), &options).unwrap();

        assert_eq!((done.from, done.to), (Format::Legacy, format));
        let bytes = fs::read(&place).unwrap();
        assert!(bytes.starts_with(format.magic()), "{format}");
        let word = format.is_libvirt().then(|| u32::from_le_bytes(bytes[28..32].try_into().unwrap()));
        assert_eq!(word, format.number(), "{format}");
        let image = Image::open(&place).unwrap();
        assert_eq!((image.format(), Preview::open(&place).unwrap().format), (format, format));
        assert_eq!(image.libvirt_header().map(|header| header.format), format.number(), "{format}");
        let verdict = verify(&place, &VerifyOptions::default()).unwrap();
        assert!(verdict.is_sound(), "{format}: {:#?}", verdict.findings);
        assert_eq!(verdict.kind, format.name());
        let inspection = inspect::inspect(&image, &Coverage::of(&image).unwrap()).unwrap();
        assert_eq!((inspection.kind.as_str(), inspection.form), (format.name(), format.form().name()));
        assert_eq!(inspection.libvirt.map(|part| part.format), word.map(|_| format.word().to_owned()));
    }
}
