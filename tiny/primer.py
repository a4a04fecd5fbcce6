# ruff: noqa: B905
"""Small functions written for this recipe, as plain examples of answers.

``chat.py`` makes dialogues of them as of every other documented function. None of them answers a
request of the held-out list in ``heldout.py``.
"""


def double(x):
    """Return twice the given number."""
    return 2 * x


def square(x):
    """Return the square of a number."""
    return x * x


def cube(x):
    """Return the cube of a number."""
    return x**3


def subtract(a, b):
    """Return the difference of two numbers."""
    return a - b


def multiply(a, b):
    """Multiply two numbers and return the product."""
    return a * b


def divide(a, b):
    """Divide a by b and return None if b is zero."""
    if b == 0:
        return None
    return a / b


def is_odd(n):
    """Check whether a number is odd."""
    return n % 2 == 1


def is_positive(x):
    """Check whether a number is greater than zero."""
    return x > 0


def is_prime(n):
    """Check whether a number is prime."""
    if n < 2:
        return False
    for i in range(2, int(n**0.5) + 1):
        if n % i == 0:
            return False
    return True


def gcd(a, b):
    """Compute the greatest common divisor of two integers."""
    while b:
        a, b = b, a % b
    return a


def lcm(a, b):
    """Compute the least common multiple of two integers."""
    x, y = a, b
    while y:
        x, y = y, x % y
    return a * b // x


def power(base, exponent):
    """Raise a number to a power by repeated multiplication."""
    result = 1
    for _ in range(exponent):
        result = result * base
    return result


def smallest(items):
    """Return the smallest item of a sequence."""
    result = items[0]
    for item in items:
        if item < result:
            result = item
    return result


def total(numbers):
    """Add up all the numbers of a list."""
    result = 0
    for number in numbers:
        result += number
    return result


def product(numbers):
    """Multiply all the numbers of a list."""
    result = 1
    for number in numbers:
        result *= number
    return result


def median(numbers):
    """Compute the median of a list of numbers."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def variance(numbers):
    """Compute the variance of a list of numbers."""
    center = sum(numbers) / len(numbers)
    return sum((x - center) ** 2 for x in numbers) / len(numbers)


def sum_of_squares(numbers):
    """Return the sum of the squares of the numbers."""
    return sum(x * x for x in numbers)


def sum_of_digits(n):
    """Return the sum of the digits of a number."""
    return sum(int(digit) for digit in str(n))


def absolute(x):
    """Return the absolute value of a number."""
    return -x if x < 0 else x


def sign(x):
    """Return the sign of a number as -1, 0 or 1."""
    if x > 0:
        return 1
    if x < 0:
        return -1
    return 0


def round_to(x, digits):
    """Round a number to the given count of digits."""
    return round(x, digits)


def first(items):
    """Return the first item of a list, or None if it is empty."""
    return items[0] if items else None


def last(items):
    """Return the last item of a list, or None if it is empty."""
    return items[-1] if items else None


def take(items, n):
    """Return the first n items of a list."""
    return items[:n]


def drop(items, n):
    """Return a list without its first n items."""
    return items[n:]


def reversed_list(items):
    """Return a list in the opposite order."""
    return items[::-1]


def count_item(items, value):
    """Count how often a value occurs in a list."""
    count = 0
    for item in items:
        if item == value:
            count += 1
    return count


def contains(items, value):
    """Check whether a list contains a value."""
    return value in items


def is_empty(items):
    """Check whether a collection is empty."""
    return len(items) == 0


def is_sorted(items):
    """Check whether a list is sorted."""
    return all(a <= b for a, b in zip(items, items[1:]))


def sort_descending(items):
    """Sort a list from the largest to the smallest item."""
    return sorted(items, reverse=True)


def sort_by_length(words):
    """Sort a list of words by their length."""
    return sorted(words, key=len)


def common_items(a, b):
    """Return the items that two lists have in common."""
    return [item for item in a if item in b]


def difference(a, b):
    """Return the items of the first list that are not in the second."""
    return [item for item in a if item not in b]


def even_numbers(numbers):
    """Keep only the numbers of a list that can be divided by two."""
    return [n for n in numbers if n % 2 == 0]


def positive_numbers(numbers):
    """Keep only the positive numbers of a list."""
    return [n for n in numbers if n > 0]


def chunks(items, size):
    """Split a list into pieces of the given size."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def pairs(items):
    """Return all the pairs of neighbours in a list."""
    return list(zip(items, items[1:]))


def rotate(items, n):
    """Rotate a list to the left by n places."""
    return items[n:] + items[:n]


def swap(items, i, j):
    """Swap two items of a list in place."""
    items[i], items[j] = items[j], items[i]


def cumulative_sum(numbers):
    """Return the running totals of a list of numbers."""
    result = []
    total = 0
    for number in numbers:
        total += number
        result.append(total)
    return result


def invert(mapping):
    """Swap the keys and values of a dictionary."""
    return {value: key for key, value in mapping.items()}


def get_value(mapping, key, default=None):
    """Look up a key in a dictionary with a default value."""
    if key in mapping:
        return mapping[key]
    return default


def sorted_keys(mapping):
    """Return the keys of a dictionary in sorted order."""
    return sorted(mapping.keys())


def group_by(items, key):
    """Group the items of a list by the result of a function."""
    groups = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def histogram(items):
    """Count how often each item occurs and return a dictionary."""
    counts = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def filter_keys(mapping, keys):
    """Keep only the given keys of a dictionary."""
    return {key: mapping[key] for key in keys if key in mapping}


def upper(text):
    """Convert a text to upper case."""
    return text.upper()


def capitalize_words(text):
    """Capitalize each word of a text."""
    return " ".join(word.capitalize() for word in text.split())


def count_vowels(text):
    """Count the vowels in a string."""
    return sum(1 for letter in text.lower() if letter in "aeiou")


def count_letter(text, letter):
    """Count how often a letter occurs in a string."""
    return text.count(letter)


def count_lines(text):
    """Count the lines of a text."""
    return len(text.splitlines())


def longest_word(text):
    """Return the longest word of a sentence."""
    return max(text.split(), key=len)


def remove_spaces(text):
    """Remove all the spaces from a string."""
    return text.replace(" ", "")


def replace_word(text, old, new):
    """Replace a word in a text by another one."""
    return text.replace(old, new)


def starts_with(text, prefix):
    """Check whether a string starts with a prefix."""
    return text.startswith(prefix)


def is_digit(text):
    """Check whether a string has only digits."""
    return text.isdigit()


def truncate(text, length):
    """Shorten a string to the given length."""
    if len(text) <= length:
        return text
    return text[: length - 3] + "..."


def repeat(text, n):
    """Repeat a string n times."""
    return text * n


def strip_lines(text):
    """Strip the white space around each line of a text."""
    return "\n".join(line.strip() for line in text.splitlines())


def write_text(path, text):
    """Write a text to a file."""
    with open(path, "w") as file:
        file.write(text)


def append_line(path, line):
    """Append a line to a file."""
    with open(path, "a") as file:
        file.write(line + "\n")


def load_json(path):
    """Load a JSON file and return its content."""
    import json

    with open(path) as file:
        return json.load(file)


def file_exists(path):
    """Check whether a file exists."""
    import os

    return os.path.isfile(path)


def list_files(folder):
    """List the names of the files in a folder."""
    import os

    return sorted(os.listdir(folder))


def to_int(text, default=0):
    """Convert a string to an integer, or return a default."""
    try:
        return int(text)
    except ValueError:
        return default


def celsius_to_fahrenheit(celsius):
    """Convert a temperature from Celsius to Fahrenheit."""
    return celsius * 9 / 5 + 32


def is_leap_year(year):
    """Check whether a year is a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def distance(x1, y1, x2, y2):
    """Compute the distance between two points."""
    return ((x1 - x2) ** 2 + (y1 - y2) ** 2) ** 0.5


def area_of_circle(radius):
    """Compute the area of a circle from its radius."""
    return 3.141592653589793 * radius**2


def countdown(n):
    """Return the numbers from n down to one."""
    return list(range(n, 0, -1))


def divisors(n):
    """Return all the divisors of a number."""
    return [d for d in range(1, n + 1) if n % d == 0]


def to_binary(n):
    """Convert a number to a string of binary digits."""
    return bin(n)[2:]


def compose(f, g):
    """Compose two functions into one."""
    return lambda x: f(g(x))


def apply_twice(function, value):
    """Apply a function twice to a value."""
    return function(function(value))


def retry(function, times):
    """Call a function again when it raises an error."""
    for _ in range(times):
        try:
            return function()
        except Exception:
            continue
    return None
