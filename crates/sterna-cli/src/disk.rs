//! A disk on the command line: `FILE[,read-only=on][,direct=on][,queues=N][,migrate=shared|copy|none]`.

use sterna_vmm::{DiskMigration, DiskOptions};

/// Reads it. A comma in the file's name is written twice.
pub fn parse(text: &str) -> Result<DiskOptions, String> {
    // No file name contains it.
    const COMMA: &str = "\0";
    let text = text.replace(",,", COMMA);
    let mut words = text.split(',').map(|word| word.replace(COMMA, ","));
    let path = words.next().filter(|path| !path.is_empty()).ok_or("name the disk's file first")?;
    let mut disk = DiskOptions::new(path);
    for word in words {
        let (name, value) =
            word.split_once('=').ok_or_else(|| format!("`{word}` is no option: write `name=value`"))?;
        let expects = |what: &str| format!("{name}={value}: {what}");
        let switch = || match value {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err(expects("on or off")),
        };
        match name {
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
            _ => return Err(format!("unknown option `{name}`: use read-only, direct, queues or migrate")),
        }
    }
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
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(says), "{text}: {why}");
        }
    }
}
