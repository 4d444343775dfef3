//! `sterna store`: the images of a store.

use std::path::{Path, PathBuf};

use serde_json::json;
use sterna_image::tools::verify::{VerifyOptions, verify_with};
use sterna_image::{Access, ImagePlace, ImageStore, Key};

use crate::exit::{Done, Status, Stop};
use crate::frames::key;
use crate::storage::Storage;
use crate::{terminal, units};

/// One of several actions on a store, and what all of them share.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A store keeps equal frames of its images once. An image in it is written store:DIRECTORY#NAME or s3://BUCKET/PREFIX#NAME, in every \
command that takes an image.")]
pub struct Arguments {
    /// The action, with its store.
    #[command(subcommand)]
    pub action: Action,
}

/// What is done with a store or with its images. `Rm` is the only one that takes names of images.
#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// List the images
    Ls(One),
    /// Remove images. Their frames stay until `gc`
    Rm {
        /// Images to remove: store:DIRECTORY#NAME or s3://BUCKET/PREFIX#NAME
        #[arg(required = true)]
        images: Vec<PathBuf>,
        /// File with the key of encrypted images
        #[arg(long, value_name = "FILE")]
        key: Option<PathBuf>,
        /// How stores in object storages are reached.
        #[command(flatten)]
        storage: Storage,
    },
    /// Remove frames that no image needs, and unfinished uploads that are older than a day. Safe while saves run: then no frame
    /// is removed
    Gc(One),
    /// Check every frame of every image
    Check(One),
    /// Show numbers and sizes
    Stat(One),
}

/// The store of an action that needs all of its images, and the key that opens them.
#[derive(Debug, clap::Args)]
pub struct One {
    /// The store: store:DIRECTORY, DIRECTORY, s3://BUCKET/PREFIX or s3://BUCKET
    pub store: PathBuf,
    /// File with the key of encrypted images
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// How images in object storages are reached.
    #[command(flatten)]
    pub storage: Storage,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Arguments {
    /// How the store is reached.
    pub fn storage(&self) -> &Storage {
        match &self.action {
            Action::Rm { storage, .. } => storage,
            Action::Ls(one) | Action::Gc(one) | Action::Check(one) | Action::Stat(one) => &one.storage,
        }
    }
}

/// Prints the result. `check` fails with status 1 if an image is damaged or cannot be read.
pub fn execute(arguments: &Arguments) -> Done {
    match &arguments.action {
        Action::Ls(one) => list(one),
        Action::Rm { images, key, .. } => remove(images, key.as_deref()),
        Action::Gc(one) => collect(one),
        Action::Check(one) => check(one),
        Action::Stat(one) => stat(one),
    }
}

impl One {
    fn directory(&self) -> Result<PathBuf, Stop> {
        let text = self.store.to_string_lossy();
        let directory = text.strip_prefix("store:").unwrap_or(&text);
        match directory.contains('#') {
            true => Err(Stop::usage(format!("{text} names an image: give the store alone, without #NAME"))),
            false => Ok(directory.into()),
        }
    }

    fn key(&self) -> Result<Option<Key>, Stop> {
        self.key.as_deref().map(key).transpose()
    }

    fn open(&self) -> Result<ImageStore, Stop> {
        ImagePlace::store(&self.directory()?, self.key()?, false).map_err(stop)
    }
}

fn list(one: &One) -> Done {
    let named = one.open()?.list().map_err(stop)?;
    terminal::print(&match one.json {
        true => {
            let images: Vec<_> = named
                .iter()
                .map(|image| json!({ "name": image.name, "digest": image.digest.to_string(), "readable": image.is_readable }))
                .collect();
            format!("{:#}", json!({ "schema": "sterna-store", "version": 1, "images": images }))
        }
        false => named
            .iter()
            .map(|image| {
                let note = image.why.as_ref().map_or(String::new(), |why| format!("  ({why})"));
                format!("{}  {}{note}", image.digest, image.name)
            })
            .collect::<Vec<_>>()
            .join("\n"),
    });
    Ok(Status::Done)
}

fn remove(images: &[PathBuf], key_file: Option<&Path>) -> Done {
    for image in images {
        match ImagePlace::parse(image).map_err(stop)? {
            ImagePlace::Store { directory, name } => {
                let key = key_file.map(key).transpose()?;
                ImagePlace::store(&directory, key, false)
                    .and_then(|store| store.remove(&name))
                    .map_err(stop)?;
            }
            ImagePlace::File(_) | ImagePlace::Object { .. } => {
                let text = format!(
                    "{} is in no store: write store:DIRECTORY#NAME or s3://BUCKET/PREFIX#NAME",
                    image.display()
                );
                return Err(Stop::usage(text));
            }
        }
    }
    Ok(Status::Done)
}

fn collect(one: &One) -> Done {
    let collected = one.open()?.collect().map_err(stop)?;
    terminal::print(&match one.json {
        true => format!(
            "{:#}",
            json!({
                "schema": "sterna-store-gc",
                "version": 1,
                "images": collected.images,
                "packs": collected.packs,
                "bytes": collected.bytes,
                "running_saves": collected.running_saves,
                "dead_leases": collected.dead_leases,
                "uploads": collected.uploads,
            })
        ),
        false if collected.running_saves > 0 => {
            format!(
                "{} saves run: nothing was removed; repeat it when they have ended",
                collected.running_saves
            )
        }
        false => format!(
            "removed {} images and {} packs: {}{}",
            collected.images,
            collected.packs,
            units::bytes(collected.bytes),
            match collected.uploads {
                0 => String::new(),
                count => format!("; {count} unfinished uploads"),
            }
        ),
    });
    Ok(Status::Done)
}

fn check(one: &One) -> Done {
    let directory = one.directory()?;
    let access = Access { key: one.key()?, bases: Vec::new() };
    let (mut is_sound, mut lines, mut rows) = (true, Vec::new(), Vec::new());
    for named in one.open()?.list().map_err(stop)? {
        let place = PathBuf::from(format!("store:{}#{}", directory.display(), named.name));
        // The state of an image that cannot be read is unknown, which is no success.
        let state = match named.why {
            Some(why) => why,
            None => match verify_with(&place, &VerifyOptions::default(), &access) {
                Ok(verdict) if verdict.is_sound() => "sound".to_owned(),
                Ok(verdict) => verdict.findings.first().map_or("damaged".to_owned(), ToString::to_string),
                Err(error) => error.to_string(),
            },
        };
        is_sound &= state == "sound";
        rows.push(json!({ "name": named.name, "state": state }));
        lines.push(format!("{}: {state}", named.name));
    }
    terminal::print(&match one.json {
        true => format!(
            "{:#}",
            json!({ "schema": "sterna-store-check", "version": 1, "sound": is_sound, "images": rows })
        ),
        false => lines.join("\n"),
    });
    Ok(if is_sound { Status::Done } else { Status::Failed })
}

fn stat(one: &One) -> Done {
    let stat = one.open()?.stat().map_err(stop)?;
    terminal::print(&match one.json {
        true => format!(
            "{:#}",
            json!({
                "schema": "sterna-store-stat",
                "version": 1,
                "names": stat.names,
                "images": stat.images,
                "index_bytes": stat.index_bytes,
                "packs": stat.packs,
                "pack_bytes": stat.pack_bytes,
                "named_bytes": stat.named_bytes,
                "leases": stat.leases,
            })
        ),
        false => format!(
            "{} names, {} images with {} of indexes; {} packs with {}; the images alone would have {}; {} saves run",
            stat.names,
            stat.images,
            units::bytes(stat.index_bytes),
            stat.packs,
            units::bytes(stat.pack_bytes),
            units::bytes(stat.named_bytes),
            stat.leases
        ),
    });
    Ok(Status::Done)
}

fn stop(error: sterna_image::StoreError) -> Stop {
    Stop::of_image(&error.into(), &[])
}
