//! `--disk NAME=FILE[,format=raw][,size=SIZE]`: the guest's disks at the standby.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna_disk::{Image, ImageOptions};
use sterna_standby::{DiskFile, StandbyDisk};

use crate::exit::Stop;
use crate::units;

/// Longest name of an NBD export that the standby accepts, bytes.
const NAME_BYTES: usize = 255;

/// A disk as the operator describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskArgument {
    name: String,
    path: PathBuf,
    /// If the file does not exist, it is created with this length.
    size: Option<u64>,
}

/// Parses the argument. A comma in the file's name is written twice.
pub fn parse(text: &str) -> Result<DiskArgument, String> {
    // A NUL byte is used as a placeholder, because no file name contains one.
    const COMMA: &str = "\0";
    let (name, rest) = text
        .split_once('=')
        .ok_or("write NAME=FILE: the name from `sterna protect --disk`, and a file on this host")?;
    if name.is_empty() || name.len() > NAME_BYTES || name.contains(',') {
        return Err(format!(
            "{name:?} is not a valid name of a disk: use 1 to {NAME_BYTES} bytes without a comma"
        ));
    }
    let rest = rest.replace(",,", COMMA);
    let mut words = rest.split(',').map(|word| word.replace(COMMA, ","));
    let path = words.next().filter(|path| !path.is_empty()).ok_or("give the disk's file after `=`")?;
    let mut disk = DiskArgument { name: name.to_owned(), path: path.into(), size: None };
    for word in words {
        match word.split_once('=') {
            Some(("format", "raw")) => {}
            Some(("format", format)) => {
                return Err(format!(
                    "format={format}: a standby supports only raw disks; `qemu-img convert` converts them"
                ));
            }
            Some(("size", size)) => disk.size = Some(units::parse_size(size)?),
            _ => return Err(format!("unknown option `{word}`: use format=raw or size=SIZE")),
        }
    }
    Ok(disk)
}

/// Opens the files, and locks them against other programs.
pub fn open(arguments: &[DiskArgument]) -> Result<Vec<StandbyDisk>, Stop> {
    let mut disks: Vec<StandbyDisk> = Vec::new();
    for argument in arguments {
        let DiskArgument { name, path, size } = argument;
        if disks.iter().any(|disk| disk.name == *name) {
            return Err(Stop::usage(format!("--disk: two disks have the name {name}")));
        }
        if let Some(size) = *size {
            make(path, size).map_err(|error| refused(path, &error.to_string()))?;
        }
        if size.is_none() && !path.exists() {
            return Err(refused(
                path,
                "the file does not exist: add `,size=SIZE` with the length of the primary's disk to create it",
            ));
        }
        let image = Image::open(&ImageOptions::new(path)).map_err(|why| refused(path, &why))?;
        if let Some(size) = size.filter(|size| *size != image.len_bytes()) {
            let why = format!(
                "it has {} bytes instead of {size}: remove it if it is not needed; it is then created with that length",
                image.len_bytes()
            );
            return Err(refused(path, &why));
        }
        image.lock().map_err(|error| refused(path, &error.to_string()))?;
        disks.push(StandbyDisk { name: name.clone(), file: Arc::new(Locked(image)) });
    }
    Ok(disks)
}

fn make(path: &Path, size: u64) -> io::Result<()> {
    // Mode 0600, because the file will contain the content of the guest's disk.
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => file.set_len(size),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

fn refused(path: &Path, why: &str) -> Stop {
    Stop::unreadable(format!("--disk: {}: {why}", path.display()))
}

struct Locked(Image);

impl DiskFile for Locked {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }
    fn read_at(&self, to: &mut [u8], at: u64) -> io::Result<()> {
        self.0.read_at(to, at)
    }
    fn write_at(&self, from: &[u8], at: u64) -> io::Result<()> {
        self.0.write_at(from, at)
    }
    fn make_zero(&self, at: u64, length: u64) -> io::Result<()> {
        self.0.make_zero(at, length)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
    fn release(&self) -> io::Result<()> {
        self.0.release()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_is_read_from_the_command_line() {
        let disk = parse("q0=/vm/a,,b.raw,format=raw,size=10G").unwrap();
        let (name, path) = ("q0".to_owned(), PathBuf::from("/vm/a,b.raw"));
        assert_eq!(disk, DiskArgument { name, path, size: Some(10 << 30) });
        for (text, word) in [
            ("file", "NAME=FILE"),
            ("=file", "not a valid name"),
            ("q0=", "file"),
            ("q0=f,format=qcow2", "raw"),
            ("q0=f,queues=2", "unknown option"),
            ("q0=f,size=7", "unit"),
        ] {
            let refused = parse(text).unwrap_err();
            assert!(refused.contains(word), "{text}: {refused}");
        }
    }

    #[test]
    fn file_is_made_if_wanted_and_nobody_else_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let text = format!("q0={},size=1M", directory.path().join("disk").display());
        let argument = parse(&text).unwrap();
        let disks = open(std::slice::from_ref(&argument)).unwrap();
        assert_eq!(disks[0].file.len_bytes(), 1 << 20);
        let refused = open(std::slice::from_ref(&argument)).map(drop).unwrap_err().to_string();
        assert!(refused.contains("locked"), "{refused}");
        disks[0].file.release().unwrap();
        assert!(open(&[argument.clone(), argument]).is_err(), "one name, one disk");
        let other = parse(&text.replace("1M", "2M")).unwrap();
        let refused = open(&[other]).map(drop).unwrap_err().to_string();
        assert!(refused.contains("remove it"), "the length is another one: {refused}");
    }

    #[test]
    fn file_that_does_not_exist_is_refused_with_the_option_that_makes_it() {
        let directory = tempfile::tempdir().unwrap();
        let text = format!("q0={}", directory.path().join("disk").display());
        let refused = open(&[parse(&text).unwrap()]).map(drop).unwrap_err().to_string();
        assert!(refused.contains("size=SIZE"), "{refused}");
        assert!(open(&[parse(&format!("{text},size=1M")).unwrap()]).is_ok());
    }
}
