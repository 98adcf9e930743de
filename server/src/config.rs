//! A file of several drives: TOML, a `[[drive]]` for each.
//!
//! The command line defines what a drive is made of, and nothing is defined here again: a key is an option without
//! its dashes, a value is what would stand behind it, and both are checked by clap.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf, absolute};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Args, FromArgMatches};
use serde::Deserialize;
use toml::{Spanned, Value};

use crate::cli::DriveOptions;
use crate::disk::Source;

#[cfg(test)]
mod tests;

/// What the file says.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    drive: Vec<Spanned<Table>>,
}

type Table = BTreeMap<Spanned<String>, Value>;

/// A drive of a file.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Where the file describes it.
    pub place: Place,
    /// What it is called.
    pub name: String,
    /// What it is made of.
    pub options: DriveOptions,
}

/// A line of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which file.
    pub path: PathBuf,
    /// The first is 1.
    pub line: usize,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.line)
    }
}

/// Why a file cannot be used, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("The file {} cannot be read: {source}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Something in it is wrong.
    #[error("{place}: {problem}")]
    Wrong {
        /// Where.
        place: Place,
        /// What.
        problem: Problem,
    },
}

/// What is wrong in a file, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// TOML, or what is not a list of drives.
    #[error("{0}")]
    Syntax(String),
    /// Nothing to serve.
    #[error("There is no drive; write a [[drive]] for each")]
    NoDrive,
    /// No such option.
    #[error("Unknown key '{key}'; the keys of a drive are {}", known.join(", "))]
    Key {
        /// What was written.
        key: String,
        /// What can be.
        known: Vec<String>,
    },
    /// Not a value of an option.
    #[error("'{key}' cannot be {kind}; write a string or a number")]
    Kind {
        /// Whose.
        key: String,
        /// What it is in TOML.
        kind: &'static str,
    },
    /// More than one value.
    #[error("'{0}' takes one value, not a list")]
    List(String),
    /// What clap says.
    #[error("{0}")]
    Value(String),
    /// Keys that a drive needs.
    #[error("This drive lacks {}; write it", keys.join(" and "))]
    Missing {
        /// Which.
        keys: Vec<String>,
    },
    /// Something that two drives cannot share.
    #[error("{what} belongs to the drive of line {first} already; {advice}")]
    Twice {
        /// What it is.
        what: String,
        /// Where it was.
        first: usize,
        /// What to do.
        advice: &'static str,
    },
}

/// Reads a file.
///
/// # Errors
/// [`ConfigError`]
pub fn read(path: &Path) -> Result<Vec<Entry>, ConfigError> {
    let text =
        fs::read_to_string(path).map_err(|source| ConfigError::Unreadable { path: path.into(), source })?;
    parse(path, &text)
}

/// Takes what the file at `path` says.
fn parse(path: &Path, text: &str) -> Result<Vec<Entry>, ConfigError> {
    let reader = Reader { path, text };
    let file: File = toml::from_str(text).map_err(|error| {
        let problem = Problem::Syntax(error.message().trim_end().replace('\n', ", "));
        reader.wrong(error.span().unwrap_or(0..0), problem)
    })?;
    if file.drive.is_empty() {
        return Err(reader.wrong(0..0, Problem::NoDrive));
    }
    let entries = file.drive.iter().map(|drive| reader.entry(drive)).collect::<Result<Vec<_>, _>>()?;
    check(&entries)?;
    Ok(entries)
}

struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Reader<'_> {
    fn place(&self, span: Range<usize>) -> Place {
        let before = self.text.get(..span.start).unwrap_or_default();
        Place { path: self.path.into(), line: before.matches('\n').count().saturating_add(1) }
    }

    fn wrong(&self, span: Range<usize>, problem: Problem) -> ConfigError {
        ConfigError::Wrong { place: self.place(span), problem }
    }

    fn entry(&self, drive: &Spanned<Table>) -> Result<Entry, ConfigError> {
        let mut command = DriveOptions::augment_args(clap::Command::new("drive"))
            .no_binary_name(true)
            .disable_help_flag(true);
        command.build();
        let mut line = Vec::new();
        for (key, value) in drive.as_ref() {
            let wrong = |problem| self.wrong(key.span(), problem);
            let option = command.get_arguments().find(|option| option.get_long() == Some(key.as_ref()));
            let option = option.ok_or_else(|| {
                let known = command.get_arguments().filter_map(Arg::get_long).map(Into::into).collect();
                wrong(Problem::Key { key: key.as_ref().clone(), known })
            })?;
            line.extend(arguments(option, key.as_ref(), value).map_err(wrong)?);
        }
        let keys: Vec<(String, String)> = command
            .get_arguments()
            .filter_map(|option| Some((option.to_string(), option.get_long()?.to_owned())))
            .collect();
        let options = command
            .try_get_matches_from(line)
            .and_then(|matches| DriveOptions::from_arg_matches(&matches))
            .map_err(|error| {
                let (key, problem) = explain(&error, &keys);
                let key = drive.as_ref().keys().find(|other| Some(other.as_ref()) == key.as_ref());
                self.wrong(key.map_or(drive.span(), Spanned::span), problem)
            })?
            .inside(self.path.parent().unwrap_or(Path::new("")));
        let Some(name) = options.name.clone() else {
            return Err(self.wrong(drive.span(), Problem::Missing { keys: vec!["name".into()] }));
        };
        Ok(Entry { place: self.place(drive.span()), name, options })
    }
}

/// What a key and its value are on the command line.
fn arguments(option: &Arg, key: &str, value: &Value) -> Result<Vec<String>, Problem> {
    let kind = |kind| Err(Problem::Kind { key: key.into(), kind });
    let argument = |value: &dyn std::fmt::Display| Ok(vec![format!("--{key}={value}")]);
    let is_switch = !option.get_action().takes_values();
    match value {
        Value::Boolean(on) if is_switch => Ok(on.then(|| format!("--{key}")).into_iter().collect()),
        _ if is_switch => Err(Problem::Value(format!("'{key}' is either true or false"))),
        Value::String(text) => argument(text),
        Value::Integer(number) => argument(number),
        Value::Boolean(on) => argument(on),
        Value::Float(_) => kind("a fraction"),
        Value::Datetime(_) => kind("a date"),
        Value::Table(_) => kind("a table"),
        Value::Array(_) if !matches!(option.get_action(), ArgAction::Append) => {
            Err(Problem::List(key.into()))
        }
        Value::Array(values) => {
            let mut line = Vec::new();
            for value in values {
                match value {
                    Value::Array(_) => return kind("a list of lists"),
                    value => line.extend(arguments(option, key, value)?),
                }
            }
            Ok(line)
        }
    }
}

/// The key that an error is about, and the error in the terms of a file. `keys`: each as on the command line, and in
/// a file.
fn explain(error: &clap::Error, keys: &[(String, String)]) -> (Option<String>, Problem) {
    let in_file = |text: &str| {
        keys.iter()
            .fold(text.to_owned(), |text, (option, key)| text.replace(option, key))
            .replace('|', " or ")
    };
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::Strings(missing)) if error.kind() == ErrorKind::MissingRequiredArgument => {
            let keys = missing.iter().map(|option| in_file(option).replace(['<', '>'], "")).collect();
            (None, Problem::Missing { keys })
        }
        about => {
            let text = error.render().to_string();
            let text = text.split("\n\n").next().unwrap_or_default().replace("error: ", "");
            let text = in_file(&text.split_whitespace().collect::<Vec<_>>().join(" "));
            let key = match about {
                Some(ContextValue::String(option)) => Some(in_file(option)),
                _ => None,
            };
            (key, Problem::Value(text))
        }
    }
}

/// Something that two drives of a process cannot both have.
#[derive(PartialEq, Eq, Hash)]
enum Belonging {
    Name(String),
    Socket(PathBuf),
    Descriptor(RawFd),
    /// By device and inode.
    Image(u64, u64),
}

impl Belonging {
    fn advice(&self) -> &'static str {
        match self {
            Self::Name(_) => "choose another name",
            Self::Socket(_) => "choose another path",
            Self::Descriptor(_) => "pass another descriptor",
            Self::Image(..) => "use another image, or add read-only to both",
        }
    }
}

/// How a drive uses what it has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Others may use it so, too.
    Reading,
    Owning,
}

/// Whether no drive takes what another has.
fn check(entries: &[Entry]) -> Result<(), ConfigError> {
    let mut owners: HashMap<Belonging, (usize, Use)> = HashMap::new();
    for entry in entries {
        for (belonging, usage, what) in belongings(entry) {
            let advice = belonging.advice();
            match owners.insert(belonging, (entry.place.line, usage)) {
                None => {}
                Some((_, Use::Reading)) if usage == Use::Reading => {}
                Some((first, _)) => {
                    let problem = Problem::Twice { what, first, advice };
                    return Err(ConfigError::Wrong { place: entry.place.clone(), problem });
                }
            }
        }
    }
    Ok(())
}

/// What a drive has, how it uses it, and what a person calls it.
fn belongings(entry: &Entry) -> Vec<(Belonging, Use, String)> {
    let DriveOptions { socket, namespaces, .. } = &entry.options;
    let mut all =
        vec![(Belonging::Name(entry.name.clone()), Use::Owning, format!("The name {}", entry.name))];
    if let Some(path) = &socket.socket_path {
        all.push((Belonging::Socket(resolve(path)), Use::Owning, format!("The socket {}", path.display())));
    }
    if let Some(fd) = socket.fd {
        all.push((Belonging::Descriptor(fd), Use::Owning, format!("Descriptor {fd}")));
    }
    for namespace in namespaces {
        // An image that is not there is none that a drive has: opening it will say so.
        if let Source::File { path, .. } = &namespace.source
            && let Ok(file) = fs::metadata(path)
        {
            let usage = if namespace.read_only { Use::Reading } else { Use::Owning };
            all.push((Belonging::Image(file.dev(), file.ino()), usage, path.display().to_string()));
        }
    }
    all
}

/// Where a file will be, whatever way there was written.
fn resolve(path: &Path) -> PathBuf {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match (fs::canonicalize(directory), path.file_name()) {
        (Ok(directory), Some(name)) => directory.join(name),
        _ => absolute(path).unwrap_or_else(|_| path.into()),
    }
}
