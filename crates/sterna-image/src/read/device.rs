//! An image on a block device that is longer than the image.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::sync::Arc;

use super::image::Image;
use super::source::{ReadAt, Stamp};
use crate::error::ImageError;

/// The first `length_bytes` of a block device.
struct Device {
    file: File,
    length_bytes: u64,
    /// Whether the length is the image's, not the device's.
    is_cut: bool,
}

/// Opens the image on the block device `file`.
///
/// The end of the image is searched once, by reading the image. The length is the device's if no end is found, or if
/// the image is compressed.
pub(super) fn open(mut file: File, name: &str) -> Result<Arc<dyn ReadAt>, ImageError> {
    let length_bytes = file.seek(SeekFrom::End(0)).map_err(|error| ImageError::io(name, "lseek", error))?;
    let again = file.try_clone().map_err(|error| ImageError::io(name, "dup", error))?;
    let whole = Device { file: again, length_bytes, is_cut: false };
    let length_bytes = match Image::open_source(Arc::new(whole), name) {
        Ok(image) if !image.format().is_compressed() && image.shape().has_eof => image.stream_end(),
        // An error of the image is reported by its readers, not here.
        _ => length_bytes,
    };
    Ok(Arc::new(Device { file, length_bytes, is_cut: true }))
}

impl ReadAt for Device {
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<usize> {
        let left = self.length_bytes.saturating_sub(offset).min(to.len() as u64) as usize;
        ReadAt::read_at(&self.file, offset, &mut to[..left])
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.length_bytes)
    }

    fn stamp(&self) -> io::Result<Stamp> {
        self.file.stamp()
    }

    fn ends_anywhere(&self) -> bool {
        !self.is_cut
    }

    fn file(&self) -> Option<&File> {
        Some(&self.file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{RamShape, Shape};
    use crate::write::LegacyWriter;

    /// A device that is longer than the image at its start.
    struct Longer(Vec<u8>);

    impl ReadAt for Longer {
        fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<usize> {
            self.0.read_at(offset, to)
        }

        fn len_bytes(&self) -> io::Result<u64> {
            self.0.len_bytes()
        }

        fn stamp(&self) -> io::Result<Stamp> {
            self.0.stamp()
        }

        fn ends_anywhere(&self) -> bool {
            true
        }
    }

    const DEVICE: &[u8] = b"\x04\0\0\0\x03\x03cpu\0\0\0\0\0\0\0\x01state\x7e\0\0\0\x03";

    fn image() -> Vec<u8> {
        let mut shape = Shape { has_configuration: true, has_end: true, has_eof: true, ..Shape::empty() };
        shape.configuration.machine_type = "none".into();
        shape.ram = RamShape { section_id: 2, blocks: Vec::new(), footers: true };
        shape.devices = DEVICE.to_vec();
        shape.description = Some(
            br#"{"page_size":4096,"devices":[{"name":"cpu","instance_id":0,"version":1,"fields":[{"name":"a","type":"buffer","size":5}]}]}"#
                .to_vec(),
        );
        LegacyWriter::new(Vec::new(), "memory", &shape).unwrap().finish(&shape).unwrap()
    }

    #[test]
    fn image_on_a_longer_device_ends_where_its_description_ends() {
        let image = image();
        for junk in [vec![0; 3 << 20], vec![0xaa; 5 << 20], image.repeat(20_000), b"old".to_vec()] {
            let device = [&image[..], &junk].concat();

            let opened = Image::open_source(Arc::new(Longer(device)), "device").unwrap();

            assert_eq!(opened.stream_end(), image.len() as u64);
            assert!(opened.shape().has_eof && opened.trailing_bytes() == 0);
            assert_eq!(opened.shape().devices.len(), DEVICE.len());
        }
    }

    #[test]
    fn image_without_its_end_on_a_device_is_torn() {
        let image = image();
        let device = [&image[..image.len() / 2], &[0; 2 << 20]].concat();

        let opened = Image::open_source(Arc::new(Longer(device)), "device");

        assert!(
            opened.is_err()
                || opened.is_ok_and(|image| !image.shape().has_eof || image.is_description_torn())
        );
    }
}
