//! A disk on the command line:
//! `FILE[,format=raw|qcow2][,backing=FILE,backing-format=raw|qcow2][,data-file=FILE]`
//! `[,read-only=on][,direct=on][,queues=N][,migrate=shared|copy|none]`.

use sterna_vmm::{DiskFormat, DiskMigration, DiskOptions};

/// Parses the argument. A comma in a file's name is written twice.
pub fn parse(text: &str) -> Result<DiskOptions, String> {
    // A NUL byte is used as a placeholder, because no file name contains one.
    const COMMA: &str = "\0";
    let text = text.replace(",,", COMMA);
    let mut words = text.split(',').map(|word| word.replace(COMMA, ","));
    let path = words.next().filter(|path| !path.is_empty()).ok_or("give the disk's file first")?;
    let mut disk = DiskOptions::new(path);
    let mut backing = (None, None);
    for word in words {
        let (name, value) =
            word.split_once('=').ok_or_else(|| format!("`{word}` is not an option: write `name=value`"))?;
        let expects = |what: &str| format!("{name}={value}: {what}");
        let switch = || match value {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err(expects("on or off")),
        };
        let format = || match value {
            "raw" => Ok(DiskFormat::Raw),
            "qcow2" => Ok(DiskFormat::Qcow2),
            _ => Err(expects("raw or qcow2")),
        };
        match name {
            "format" => disk.format = format()?,
            "backing" => backing.0 = Some(value.into()),
            "backing-format" => backing.1 = Some(format()?),
            "data-file" => disk.data_file = Some(value.into()),
            "read-only" => disk.is_read_only = switch()?,
            "direct" => disk.is_direct = switch()?,
            "queues" => {
                let most = DiskOptions::QUEUES_MAX;
                let queues = value.parse().ok().filter(|queues| (1..=most).contains(queues));
                disk.queues = queues.ok_or_else(|| expects(&format!("a number from 1 to {most}")))?;
            }
            "migrate" => {
                disk.migration = match value {
                    "shared" => DiskMigration::Shared,
                    "copy" => DiskMigration::Copy,
                    "none" => DiskMigration::None,
                    _ => return Err(expects("shared, copy or none")),
                }
            }
            _ => {
                return Err(format!(
                    "unknown option `{name}`: use format, backing, backing-format, data-file, read-only, direct, queues or migrate"
                ));
            }
        }
    }
    disk.backing = match backing {
        (Some(file), Some(format)) => Some((file, format)),
        (None, None) => None,
        _ => return Err("give `backing=FILE` and `backing-format=raw|qcow2` together".to_owned()),
    };
    Ok(disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_follow_the_file() {
        let disk = parse("/a,,b.img,read-only=on,direct=on,queues=4,migrate=none").unwrap();

        assert_eq!(disk.path, std::path::Path::new("/a,b.img"));
        assert!(disk.is_read_only && disk.is_direct);
        assert_eq!((disk.queues, disk.migration), (4, DiskMigration::None));
        assert_eq!(parse("x").unwrap(), DiskOptions::new("x"));
        let disk = parse("x,format=qcow2,backing=b,,c,backing-format=raw,data-file=d").unwrap();
        assert_eq!((disk.format, disk.backing), (DiskFormat::Qcow2, Some(("b,c".into(), DiskFormat::Raw))));
        assert_eq!(disk.data_file, Some("d".into()));
    }

    #[test]
    fn wrong_option_is_named() {
        for (text, says) in [
            ("", "file first"),
            (",direct=on", "file first"),
            ("x,y", "`y`"),
            ("x,read-only=yes", "read-only=yes: on or off"),
            ("x,queues=9", "from 1 to 8"),
            ("x,migrate=yes", "shared, copy or none"),
            ("x,cache=none", "`cache`"),
            ("x,format=vmdk", "format=vmdk: raw or qcow2"),
            ("x,format=qcow2,backing=b", "together"),
            ("x,backing-format=raw", "together"),
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(says), "{text}: {why}");
        }
    }
}
